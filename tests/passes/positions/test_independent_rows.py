"""What is computed between the ops gives each token a row of its own; a graph that mixes rows there is refused, and the module is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops import experts as experts_op
from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.passes.positions.independent_rows import MixesRows
from tests.passes.graphs import Toy, assert_ragged_equals_alone, rewrite_of

Change = Callable[[Tensor, Tensor], Tensor]
TAPS = torch.randn(4, 1, 3, 1, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


class Changed(nn.Module):
    """Queries [1, 4, T, 8] go through `change` with the positions [1, T] before attention."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.change(q, pos), k, v, is_causal=True, enable_gqa=True)


def shifted(q: Tensor, pos: Tensor) -> Tensor:
    return q + F.pad(q, (0, 0, 17, 0))[:, :, :-17]


def convolved(q: Tensor, pos: Tensor) -> Tensor:
    return F.conv2d(F.pad(q, (0, 0, 18, 0)), TAPS, groups=4, dilation=(9, 1))


def written(q: Tensor, pos: Tensor) -> Tensor:
    q = q.clone()
    q[:, :, 1:] += 1 + q[:, :, :-1]
    return q


def looked_up(q: Tensor, pos: Tensor) -> Tensor:
    before = torch.arange(q.shape[2]) - 1500
    return q + torch.where((before >= 0)[:, None], q[:, :, before.clamp(min=0)], 0.0)


def by_the_farthest(q: Tensor, pos: Tensor) -> Tensor:
    return q / (pos.max() + 1).clamp(min=100)


MIXED: dict[str, Change] = {
    "a row before": shifted,
    "a row far before": lambda q, pos: q + F.pad(q, (0, 0, 300, 0))[:, :, : q.shape[2]],
    "a row farther before": lambda q, pos: q + F.pad(q, (0, 0, 3000, 0))[:, :, : q.shape[2]],
    "a row at a counted number": looked_up,
    "a dilated convolution": lambda q, pos: F.conv2d(F.pad(q, (0, 0, 1800, 0)), TAPS, groups=4, dilation=(900, 1)),
    "a convolution": convolved,
    "a sum": lambda q, pos: q.cumsum(2),
    "the largest so far": lambda q, pos: q.cummax(2).values,
    "the mean": lambda q, pos: q + q.mean(2, keepdim=True),
    "rolled": lambda q, pos: q + q.roll(1, 2),
    "written in place": written,
    "the first row": lambda q, pos: q + q[:, :, :1],
    "the last row": lambda q, pos: q + q[:, :, -1:],
    "as far as there is room": lambda q, pos: torch.where((q > 0).cumsum(2) <= q.shape[2] // 4, q, 0.0),
    "rows by rank": lambda q, pos: q * q[..., :1].argsort(2),
}
APART: dict[str, Change] = {
    "heads mixed": lambda q, pos: torch.einsum("bhtd,hg->bgtd", q, WEIGHTS),
    "sorted and back": lambda q, pos: q.sort(2).values.gather(2, q.argsort(2).argsort(2)),
    "normed": lambda q, pos: F.layer_norm(q, q.shape[-1:]),
    "in place": lambda q, pos: q.clone().mul_(pos[:, None, :, None] * 0.01),
}


def refusal_of(module: nn.Module) -> MixesRows:
    """What an engine's trace raises, and why a compiled model pages no batch."""
    result = rewrite_of(module)
    assert result.gm is None and result.mixes is not None and str(result.mixes) == result.not_paged
    return result.mixes


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_take_from_others_are_refused(name: str) -> None:
    refusal = refusal_of(Toy(Changed(MIXED[name])))
    assert "mixes tokens" in str(refusal) and refusal.module == "attend" and not refusal.by_position


def test_what_only_a_far_position_moves_is_paged_if_nobody_can_run_it_on_all_tokens() -> None:
    """A compiled model's self-check refuses it, and says what to set."""
    result = rewrite_of(Toy(Changed(by_the_farthest)))
    assert result.mixes is not None and result.mixes.by_position and result.mixes.module == "attend"
    assert result.gm is not None and not result.not_paged


@pytest.mark.parametrize("name", APART)
def test_rows_of_their_own_are_served(name: str) -> None:
    assert_ragged_equals_alone(Toy(Changed(APART[name])))


def test_rows_that_mix_behind_the_last_attention_are_refused() -> None:
    class Late(Toy):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return super().forward(input_ids, position_ids).cumsum(1)

    assert "the model's forward: cumsum" in str(refusal_of(Late(Changed(lambda q, pos: q))))


def test_a_far_position_that_moves_the_models_own_forward_is_told_without_a_self_check() -> None:
    class Scaled(Toy):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return super().forward(input_ids, position_ids) * (1 + position_ids.max() / 50)

    result = rewrite_of(Scaled(Changed(lambda q, pos: q)))
    assert result.mixes is not None and result.mixes.by_position
    assert "the model's forward: max_1 mixes tokens" in str(result.mixes) and "max_position_embeddings" in str(result.mixes)


def through_experts(q: Tensor, pos: Tensor) -> Tensor:
    """Behind them stands what tells the last bit, as routers with ties do."""
    rows = q[0].transpose(0, 1).flatten(1)
    weights = torch.linspace(-1, 1, 4 * 32 * 32).view(4, 32, 32)
    chosen = (rows[:, :2] > 0).long() + torch.tensor([0, 2])
    added = experts_op.EXPERTS(
        rows, chosen, rows[:, 2:4], weights, weights, None, None, *Gating("silu", False).arguments, experts_op.ONE_BY_ONE
    )
    return q + torch.sin(added * 1e6).view(-1, 4, 8).transpose(0, 1)


def test_experts_that_round_otherwise_in_other_company_mix_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = experts_op.experts_one_by_one

    def rounded(x: Tensor, ids: Tensor, *others: Any) -> Tensor:
        return exact(x, ids, *others) * (1 + 1e-6 * float(ids.sum() % 7))

    monkeypatch.setattr(experts_op, "experts_one_by_one", rounded)
    rewrite_of(Toy(Changed(through_experts)))


def by_the_length(q: Tensor, pos: Tensor) -> Tensor:
    """NTK scaling, as code of one's own has it: another base for a call of more than 256 tokens."""
    base = 10000.0 * max(1.0, q.shape[2] / 256)
    return q * torch.cos(pos[:, None, :, None] / base ** (torch.arange(8) / 8))


@pytest.mark.parametrize("change", [by_the_length, lambda q, pos: q * torch.tensor(q.shape[2] / 1000).clamp(min=1)])
def test_a_number_that_follows_the_length_of_long_calls_is_refused(change: Change) -> None:
    with pytest.raises(UnsupportedError, match="is made from the number of tokens and differs between a call of 1031 tokens and one of"):
        rewrite_of(Toy(Changed(change)))
