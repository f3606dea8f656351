"""Gates and norm of a gated delta rule become part of its op, in whatever way they are written; others stay, with the model's tokens."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.ops.scans import GATED_DELTA_NET, GATED_DELTA_RULE
from tests.oracle import greedy, random_prompts
from tests.recurrent_models import recurrent
from tests.zoo.build import build

PROMPTS = random_prompts([5, 21, 12])
NEW = 6


def served(model: Any, **settings: Any) -> tuple[int, int, list[Any]]:
    """Ops with gates and norm, and without, in the graph, and all arguments of the first of them."""
    want = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    with LLM(model, num_pages=64, max_requests=4, max_batch_tokens=16, **settings) as llm:
        assert [list(each.token_ids) for each in llm.generate(PROMPTS, SamplingParams(max_tokens=NEW, ignore_eos=True))] == want
        rewrite = llm.engine.runner.compiled.rewrite  # type: ignore[union-attr]
    assert rewrite.gm is not None
    whole, alone = (rewrite.gm.graph.find_nodes(op="call_function", target=op) for op in (GATED_DELTA_NET, GATED_DELTA_RULE))
    assert len(whole) == rewrite.counts["gated_delta_net"]
    return len(whole), len(alone), list(whole[0].args) if whole else []


def test_gates_in_groups_of_a_projection() -> None:
    model = recurrent("qwen3_next")
    count, alone, given = served(model)
    assert (count, alone) == (2, 0)
    a, b, z = given[4], given[6], given[8]
    assert (a, b, z) == ([2, 2, 4, 2], [0, 2, 4, 2], [32, 2, 48, 16])
    assert given[13:18] == [True, 1.0, 1e-6, 0.0, "silu"]
    assert served(model, disable_passes=("gated_delta_net",))[:2] == (0, 2)
    assert served(model, merge_linears=True, gemv=True)[:2] == (2, 0)


@pytest.mark.parametrize("kind, factor", [("qwen3_5_text", 1.0), ("olmo_hybrid", 2.0)])
def test_gates_with_projections_of_their_own(kind: str, factor: float) -> None:
    """OLMo's gate of the norm is computed behind the rule, and its beta goes up to 2."""
    count, alone, given = served(build(kind))
    assert count == 2 and not alone and given[14] == factor


def changed(norm: Callable[[Any, Tensor, Tensor], Tensor]) -> Any:
    model = copy.deepcopy(recurrent("qwen3_next"))
    for module in list(model.modules()):
        if type(module).__name__ == "Qwen3NextRMSNormGated":
            module.__class__ = type("Norm", (type(module),), {"forward": norm})
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


def _sigmoid(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), self.weight + 1, 1e-5) * torch.sigmoid(gate)


def _divided(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return gate * gate.sigmoid() * self.weight * (x / (x.square().mean(-1, keepdim=True) + 1e-4).sqrt())


@pytest.mark.parametrize("norm, numbers", [(_sigmoid, [1e-5, 1.0, "sigmoid"]), (_divided, [1e-4, 0.0, "silu"])])
def test_other_spellings_of_the_norm(norm: Callable[..., Tensor], numbers: list[Any]) -> None:
    count, alone, given = served(changed(norm))
    assert (count, alone) == (2, 0) and given[15:18] == numbers


def _gate_first(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return F.rms_norm(x * F.silu(gate), (x.shape[-1],), self.weight, 1e-6)


def _tanh(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6) * torch.tanh(gate)


def _read_twice(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6) * F.silu(gate) + torch.tanh(x)


def _of_all_heads(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    whole = x.reshape(-1, 4 * x.shape[-1])
    return F.rms_norm(whole, (whole.shape[-1],), self.weight.repeat(4), 1e-6).reshape(x.shape) * F.silu(gate)


def _swapped(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6) * F.silu(gate.reshape(-1, 2, x.shape[-1]).flip(1).reshape(x.shape))


@pytest.mark.parametrize("norm", [_gate_first, _tanh, _read_twice, _of_all_heads, _swapped])
def test_norms_of_another_form_stay(norm: Callable[..., Tensor]) -> None:
    assert served(changed(norm))[:2] == (0, 2)


def test_gates_of_another_form_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[type(recurrent("qwen3_next")).__module__]
    other = types.SimpleNamespace(**{**vars(F), "softplus": lambda x: F.softplus(x, beta=2.0)})
    monkeypatch.setattr(module, "F", other)
    assert served(copy.deepcopy(recurrent("qwen3_next")))[:2] == (0, 2)
