"""Which calls can run a paged batch, and the reason given for each that cannot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.passes.graphs import TOKENS, Toy, masked, model_inputs, rewrite_of, trace


def lower(ids: Tensor, pos: Tensor) -> Tensor:
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


class Wrapped(nn.Module):
    """The toy with one more input of the call, as HF models have them."""

    def __init__(self, toy: Toy) -> None:
        super().__init__()
        self.toy = toy

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.toy(input_ids, position_ids) * attention_mask[..., None]


def test_roles_of_a_paged_call() -> None:
    form = trace(masked(lower)).form
    assert form.reason == ""
    roles = list(form.roles.values())
    assert {role: roles.count(role) for role in ("input_ids", "position_ids", "tokens")} == {"input_ids": 1, "position_ids": 1, "tokens": 2}
    assert set(roles) == {"input_ids", "position_ids", "tokens", "owned"}
    assert form.positions is not None and form.roles[form.positions] == "position_ids"


def test_another_input_of_the_call() -> None:
    mask = torch.ones(1, TOKENS)
    torch._dynamo.mark_dynamic(mask, 1)
    result = rewrite_of(Wrapped(masked(lower)), attention_mask=mask)
    assert result.gm is None
    assert "passes attention_mask" in result.not_paged


def test_a_call_of_a_fixed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo, "mark_dynamic", lambda tensor, dim: None)
    result = rewrite_of(masked(lower))
    assert result.gm is None and f"a fixed length of {TOKENS} tokens" in result.not_paged


def test_a_batch_of_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    two_rows = {name: tensor.repeat(2, 1) for name, tensor in model_inputs().items()}
    for tensor in two_rows.values():
        torch._dynamo.mark_dynamic(tensor, 1)
    monkeypatch.setattr("tests.passes.graphs.model_inputs", lambda **_: two_rows)
    result = rewrite_of(masked(lower))
    assert result.gm is None and "batch size 2; a paged batch is one row" in result.not_paged


def test_a_branch_on_the_length_limits_the_trace() -> None:
    def mask(ids: Tensor, pos: Tensor) -> Tensor:
        return lower(ids, pos) if ids.shape[1] <= 4096 else lower(ids, pos).triu(-4095)

    result = rewrite_of(masked(mask))
    assert result.gm is None and result.not_paged.startswith("the trace holds only for up to 4096 tokens")


def test_a_slice_at_a_fixed_place_limits_the_trace_too() -> None:
    def mask(ids: Tensor, pos: Tensor) -> Tensor:
        visible = lower(ids, pos)
        visible[..., 4096:] = False
        return visible

    assert rewrite_of(masked(mask)).gm is None
