"""How many tokens before a token a program's result is made of: few, as in convolutions, or any number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.specs.recompute import RowInput
from paged_attn.passes.recompute.reach import MOST, reach_of

WIDTH, TOTAL = 6, 273
Mix = Callable[[Tensor], Tensor]  # [T, 6] -> the same


def before(x: Tensor, count: int = 1) -> Tensor:
    return F.pad(x, (0, 0, count, 0))[: len(x)]


def convolved(x: Tensor, taps: int) -> Tensor:
    weights = torch.linspace(-1, 1, taps).expand(WIDTH, 1, taps)
    return F.conv1d(x.T, weights, padding=taps - 1, groups=WIDTH)[:, : len(x)].T


def decaying(x: Tensor, decay: float) -> Tensor:
    rows = []
    for row in x:
        rows.append(row + decay * rows[-1] if rows else row)
    return torch.stack(rows)


def since_a_choice(x: Tensor, low: float) -> Tensor:
    """The row of the last token that was chosen, most of which are."""
    places = torch.where(x[:, 0] > low, torch.arange(len(x)), 0).cummax(0).values
    return x + x[places]


def attention(x: Tensor) -> Tensor:
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    return (x @ x.T).masked_fill(hidden, -torch.inf).softmax(-1) @ x


def of_blocks(x: Tensor) -> Tensor:
    """In calls of 200 tokens and more the first one counts for all."""
    return x + x[:1] if len(x) >= 200 else x


def reach(mix: Mix, least: int = 1) -> int | None:
    def program(length: int, rows: Sequence[Tensor], owned: Sequence[Tensor]) -> Tensor:
        return mix(rows[0])[:, None]

    return reach_of(program, [RowInput((WIDTH,), 0, (0, 1), torch.float32, WIDTH)], [], TOTAL, least, torch.device("cpu"))


FEW: dict[str, tuple[Mix, int]] = {
    "each its own": (torch.exp, 0),
    "the one before": (before, 1),
    "with a weight of zero": (lambda x: x + 0 * before(x, 3), 3),
    "a convolution": (lambda x: convolved(x, 4), 3),
    "two, with a norm between": (lambda x: convolved(F.layer_norm(convolved(x, 4), (WIDTH,)), 2), 4),
    "as far as is tried": (lambda x: before(x, MOST), MOST),
}
MANY: dict[str, Mix] = {
    "one more": lambda x: before(x, MOST + 1),
    "a running sum": lambda x: x.cumsum(0),
    "a decay": lambda x: decaying(x, 0.9),
    "a fast decay": lambda x: decaying(x, 0.1),
    "the first token": lambda x: x + x[:1],
    "the number of tokens": lambda x: x * len(x),
    "the place of a token": lambda x: x + torch.arange(len(x))[:, None],
    "a place now and then": lambda x: x + before(x) * (torch.arange(len(x)) % 4 == 0)[:, None],
    "since a choice": lambda x: since_a_choice(x, 0.0),
    "since a choice that is seldom not made": lambda x: since_a_choice(x, -3.0),
    "attention": attention,
    "a later token": lambda x: x.roll(-1, 0),
    "another code in long calls": of_blocks,
    "nothing but long calls": lambda x: F.conv1d(x.T[None], torch.ones(WIDTH, WIDTH, 40))[0].T,
    "NaN": lambda x: x * torch.nan,
}


@pytest.mark.parametrize("name", FEW)
def test_few_tokens(name: str) -> None:
    mix, expected = FEW[name]
    assert reach(mix) == reach(mix, least=30) == expected


@pytest.mark.parametrize("name", MANY)
def test_any_number_of_tokens(name: str) -> None:
    assert reach(MANY[name]) is None
