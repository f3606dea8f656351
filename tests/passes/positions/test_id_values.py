"""What a model makes of token ids is a row's own, whichever of all ids makes a difference to other rows; or it is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from tests.passes.graphs import VOCAB, Toy, assert_ragged_equals_alone, rewrite_of

RARE = VOCAB - 1  # no probe of a few tokens has it
TABLE = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(1))
NEWER = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))
Change = Callable[[Tensor, Tensor], Tensor]


def changing(change: Change) -> Toy:
    """The queries [1, 4, T, 8] go through `change` with the ids [1, T] before attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(change(q, ids), k, v, is_causal=True, enable_gqa=True)

    return Toy(attend)


def since_the_rare_one(ids: Tensor) -> Tensor:
    rows = torch.arange(ids.shape[1])[None]
    return rows - torch.cummax(torch.where(ids == RARE, rows, 0), 1).values


FOLLOWING: dict[str, Change] = {
    "segments": lambda q, ids: q + (ids == RARE).cumsum(1)[:, None, :, None],
    "positions from the last rare one": lambda q, ids: q + since_the_rare_one(ids)[:, None, :, None],
    "whether there was one": lambda q, ids: torch.where(((ids >= RARE).cumsum(1) > 0)[:, None, :, None], -q, q),
    "whether there is one": lambda q, ids: torch.where((ids == RARE).any(), -q, q),
    "the one before": lambda q, ids: q * (1 + (F.pad(ids, (1, 0))[:, :-1] == RARE))[:, None, :, None],
    "whether it begins with one": lambda q, ids: torch.where(ids[:, :1] == RARE, -q, q),
    "whether it is the second": lambda q, ids: q * (1 + (ids[0, 1] == RARE)),
    "the largest": lambda q, ids: q * ids.max(),
    "as numbers": lambda q, ids: q * torch.sigmoid((ids == RARE).float().cumsum(1))[:, None, :, None],
}
FLAG = (torch.arange(VOCAB) == RARE).float()[:, None]
FOLLOWING["by a table of flags"] = lambda q, ids: q + F.embedding(ids, FLAG).squeeze(-1).cumsum(1)[:, None, :, None]
OWN: dict[str, Change] = {
    "whether it is the rare one": lambda q, ids: torch.where((ids == RARE)[:, None, :, None], -q, q),
    "its row": lambda q, ids: q + F.embedding(ids, TABLE)[:, None],
    "its newer number": lambda q, ids: q + F.embedding(NEWER[ids], TABLE)[:, None],
    "at its position": lambda q, ids: q * (1 + (ids % 3) * torch.arange(ids.shape[1]))[:, None, :, None],
    "one of so many": lambda q, ids: q + (F.one_hot(ids, VOCAB).float() @ TABLE)[:, None],
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_row_that_follows_other_rows_ids_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"is made of token ids, and a row's value also depends on the ids of other rows"):
        rewrite_of(changing(FOLLOWING[name]))


@pytest.mark.parametrize("name", OWN)
def test_a_row_that_follows_its_own_is_served(name: str) -> None:
    assert_ragged_equals_alone(changing(OWN[name]))


class Clamped(Toy):
    """Placeholders below 0 count as 0, and the last of more ids than are tried by default begins a segment."""

    def __init__(self, num_ids: int) -> None:
        super().__init__(lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        self.embed = torch.nn.Embedding(num_ids, 32)
        self.last = num_ids - 1

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        segments = (input_ids == self.last).cumsum(1)
        return super().forward(input_ids.clamp(min=0), position_ids + segments)


def test_as_many_ids_are_tried_as_a_table_has_that_is_looked_up_with_what_is_made_of_them() -> None:
    with pytest.raises(UnsupportedError, match="is made of token ids"):
        rewrite_of(Clamped(5000))
