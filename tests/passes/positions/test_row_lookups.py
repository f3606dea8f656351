"""Rows made for a whole call and looked up at each token's own position are read without the lookup, and become the batch's rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from tests.passes.graphs import Toy, assert_ragged_equals_alone, rewrite_of

Change = Callable[[Tensor, Tensor], Tensor]
TABLE = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
ANGLES = torch.tensor([1.0, 0.5, 0.25, 0.125])


def changing(change: Change) -> Toy:
    """The queries [1, 4, T, 8] go through `change(q, position_ids)` before attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(change(q, pos), k, v, is_causal=True, enable_gqa=True)

    return Toy(attend)


def sliced_four_dims(q: Tensor, pos: Tensor) -> Tensor:
    """LLaMA of transformers 4.31: [1, 1, T, dim], squeezed twice, then looked up."""
    rows = TABLE[None, None][:, :, : q.shape[2], ...].to(q.dtype)
    return q + 3 * rows.squeeze(1).squeeze(0)[pos].unsqueeze(1)


def computed(q: Tensor, pos: Tensor) -> Tensor:
    angle = torch.outer(torch.arange(q.shape[2]).float(), ANGLES)
    turn = torch.cat((angle, angle), -1)
    return q * turn.cos()[pos].unsqueeze(1) + q.flip(-1) * turn.sin()[pos].unsqueeze(1)


LOOKUPS: dict[str, Change] = {
    "a slice": lambda q, pos: q + 3 * TABLE[: q.shape[2]][pos].unsqueeze(1),
    "a slice of four dims": sliced_four_dims,
    "computed for the call": computed,
    "by embedding": lambda q, pos: q + 3 * F.embedding(pos, TABLE[: q.shape[2]]).unsqueeze(1),
    "by index_select": lambda q, pos: q + 3 * TABLE[: q.shape[2]].index_select(0, pos[0]),
    "in the second dim": lambda q, pos: q + 3 * TABLE.T[:, : q.shape[2]][:, pos[0]].T,
    "at numbers of its own": lambda q, pos: q + 3 * TABLE[: q.shape[2]][torch.arange(q.shape[2])],
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_ragged_row_reads_the_rows_of_its_positions(name: str) -> None:
    assert assert_ragged_equals_alone(changing(LOOKUPS[name])).positions_redirected >= 1


def test_a_lookup_in_a_table_of_fixed_length_is_left_alone() -> None:
    assert assert_ragged_equals_alone(changing(lambda q, pos: q + 3 * TABLE[pos].unsqueeze(1))).positions_redirected == 0


def test_how_many_positions_there_are() -> None:
    assert rewrite_of(changing(LOOKUPS["a slice"])).max_positions == 64


def written(q: Tensor, pos: Tensor) -> Tensor:
    rows = TABLE[: q.shape[2]].clone()
    rows.mul_(2)
    return q + rows[pos].unsqueeze(1)


REFUSED: dict[str, Change] = {
    "from the end": lambda q, pos: q + TABLE[: q.shape[2]][q.shape[2] - 1 - pos].unsqueeze(1),
    "the one before": lambda q, pos: q + TABLE[: q.shape[2]][(pos - 1).clamp(min=0)].unsqueeze(1),
    "by a token": lambda q, pos: q + TABLE[: q.shape[2]][q[0, 0].argmax(-1)],
    "changed in place": written,
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_lookups_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="is indexed by something other than each token's position"):
        rewrite_of(changing(REFUSED[name]))
