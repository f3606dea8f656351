"""Two ranks' parts of a module of experts, added up here: as a module, and as ops; no processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from paged_attn.engine.tracing.experts_as_ops import experts_as_ops, is_experts, proved_experts
from paged_attn.parallel import own_experts as module_of_own
from paged_attn.parallel.own_experts import WholeExperts, own_experts
from tests.versions import newest_only
from tests.zoo.build import build

RANKS = 2


@pytest.fixture
def apart() -> Iterator[None]:
    """Each rank keeps its part of the sum."""
    with mock.patch.object(module_of_own, "all_reduce", lambda partial, group: partial):
        yield


def part(whole: Any, rank: int) -> Any:
    """A module as rank `rank` has it."""
    from copy import deepcopy

    own = deepcopy(whole)
    count = whole.num_experts // RANKS
    for name, weight in whole.named_parameters(recurse=False):
        setattr(own, name, nn.Parameter(weight[rank * count : (rank + 1) * count].detach()))
    own.num_experts, own._is_expert_parallel = count, True
    forward = type(own).forward.__get__(own)
    own.forward = WholeExperts(forward, "nobody", rank * count, count, whole.num_experts).summed
    return own


def given(whole: Any) -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(2)
    hidden = dict(whole.named_parameters())["down_proj"].shape[2 if whole.is_transposed else 1]
    ids = torch.rand(9, whole.num_experts, generator=numbers).topk(2).indices
    ids[0], ids[1] = torch.tensor([0, 1]), torch.tensor([2, 3])  # all of one rank
    return torch.randn(9, hidden, generator=numbers), ids, torch.rand(9, 2, generator=numbers)


def experts_of(model_type: str) -> Any:
    return next(module for module in build(model_type).modules() if is_experts(module))


@pytest.mark.parametrize("implementation", [pytest.param("eager", marks=newest_only), "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_the_parts_add_up_to_the_whole(model_type: str, implementation: str, apart: None) -> None:
    """Whatever computes the experts: some forwards of transformers compute one for every id."""
    if (model_type, implementation) == ("gpt_oss", "eager"):
        pytest.skip("this forward takes no id of nobody, with transformers' own hooks neither; so it is with all eager ones of 5.17")
    whole = experts_of(model_type)
    whole.config._experts_implementation = implementation
    parts = [part(whole, rank)(*given(whole)) for rank in range(RANKS)]
    torch.testing.assert_close(parts[0] + parts[1], whole(*given(whole)))
    assert all((each.abs().sum(1) == 0).any() for each in parts), "each rank has a token of which it has no expert"


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_part_is_proved_and_becomes_the_op(model_type: str, apart: None) -> None:
    whole = experts_of(model_type)
    found, of_whole = proved_experts(own := part(whole, 1)), proved_experts(whole)
    assert found is not None and of_whole is not None and found.gating == of_whole.gating and found.layout.experts == 2
    holder = own_experts(own)
    assert holder is not None
    before = holder.forward
    with experts_as_ops(own) as count:
        assert count == 1 and holder.forward is not before and own.forward.__func__ is WholeExperts.summed
    assert holder.forward is before


def test_a_part_that_computes_an_expert_for_ids_of_others_is_left_alone(apart: None) -> None:
    own = part(experts_of("qwen3_moe"), 0)
    holder = own_experts(own)
    assert holder is not None
    forward = holder.forward
    holder.forward = lambda x, ids, weights: forward(x, ids.clamp(max=1), weights)
    assert proved_experts(own) is None
