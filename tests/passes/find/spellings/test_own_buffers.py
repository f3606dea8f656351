"""Keys and values that a module writes into a buffer and reads back are taken as they were written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn.passes.positions.row_replacement import MadeOfLength
from tests.passes.graphs import Toy, assert_ragged_equals_alone, called, rewrite_of

ROWS = 64


class Cached(nn.Module):
    """`write(self, k, v, T)` returns keys and values [1, heads, T, 8], made of k, v [1, T, 2, 8]."""

    def __init__(self, through: Callable[[Any, Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.through = through
        self.register_buffer("keys", torch.zeros(2, ROWS, 2, 8))
        self.register_buffer("values", torch.zeros(2, ROWS, 2, 8))
        self.register_buffer("one_row", torch.zeros(1, ROWS, 2, 8))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        keys, values = self.through(self, key.transpose(1, 2), value.transpose(1, 2), key.shape[2])
        return F.scaled_dot_product_attention(query, keys.transpose(1, 2), values.transpose(1, 2), is_causal=True, enable_gqa=True)


def slices(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    self.keys[:1, 0:length] = k
    self.values[:1, 0:length] = v
    return self.keys[:1, :length], self.values[:1, :length]


def moved_first(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    keys, values = self.keys.to(k), self.values.to(v)
    keys[:1, 0:length] = k
    values[:1, 0:length] = v
    return keys[:1, :length], values[:1, :length]


def one_dim_less(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    self.keys[:1, :length] = k[0]
    self.values[0:1, :length, :, :] = v[0]
    return self.keys[0:1, :length], self.values[:1, 0:length, :]


def written_twice(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    self.keys[:1, :length] = v
    self.keys[:1, :length] = k * 2
    return self.keys[:1, :length], v


def written_after_it_was_read(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """What was read is a view."""
    self.keys[:1, :length] = v
    old = self.keys[:1, :length]
    self.keys[:1, :length] = k * 2
    return self.keys[:1, :length], old


def copied_in_place(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    self.keys[:1, :length].copy_(k)
    values = self.values[0:1, :length]
    values.copy_(v)
    return self.keys[:1, :length], values


def narrowed(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    part = self.one_row.narrow(1, 0, length)
    part.copy_(k)
    return part, v + self.one_row.narrow(1, 0, length)


def both_in_one(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    self.keys[0, :length] = k[0]
    self.keys[1, :length] = v[0]
    return self.keys[0, :length][None], self.keys[1, :length][None]


def at_places(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(length)
    self.keys[:1, places] = k
    self.values[:1, places, :] = v
    return self.keys[:1, :length], self.values[:1, places]


def index_copied(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    self.one_row.index_copy_(1, torch.arange(0, length), k)
    return self.one_row[:, :length], v


def kept_for_later(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """What nobody reads."""
    self.keys[:1, torch.arange(length)] = k
    return k, v


TAKEN = [
    at_places, index_copied, kept_for_later, both_in_one, slices, moved_first, one_dim_less, written_twice, written_after_it_was_read,
    copied_in_place, narrowed,
]  # fmt: skip


@pytest.mark.parametrize("through", TAKEN, ids=lambda through: through.__name__)
def test_steps_may_have_more_tokens_than_the_buffer_has_rows(through: Callable[..., tuple[Tensor, Tensor]]) -> None:
    toy = Toy(Cached(through))
    found = assert_ragged_equals_alone(toy, lengths=(50, 40, 60))
    assert found.gm is not None and not called(found.gm.graph, "setitem")
    assert any(buffer.abs().sum() > 0 for buffer in toy.attend.buffers()), "the model's own calls still write"


def scaled_behind(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The keys change in place after they were written."""
    self.keys[:1, :length] = k
    k.mul_(3.0)
    return self.keys[:1, :length], v


def changed_once_read(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    self.keys[:1, :length] = k
    keys = self.keys[:1, :length]
    k.mul_(3.0)
    return keys, v


def other_rows(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Another row of the buffer is read than was written."""
    self.keys[:1, :length] = k
    return self.keys[1:2, :length] + k, v


def overwritten_in_part(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    self.keys[:1, :length] = k
    self.keys[0, :length, 1] = v[0, :, 0]
    return self.keys[:1, :length], v


def changed_after_it_was_read(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    self.keys[:1, :length] = k
    keys = self.keys[:1, :length]
    keys.mul_(2.0)
    return keys, v + k


def one_place(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Written where a call's tokens do not matter, and read by nobody."""
    self.keys[1, 3] = 1.0 + torch.zeros(2, 8)
    return k, v


LEFT_ALONE = [one_place, overwritten_in_part, scaled_behind, changed_once_read, other_rows, changed_after_it_was_read]


@pytest.mark.parametrize("through", LEFT_ALONE, ids=lambda through: through.__name__)
def test_other_buffers_are_left_alone(through: Callable[..., tuple[Tensor, Tensor]]) -> None:
    toy = Toy(Cached(through))
    found = rewrite_of(toy) if through is other_rows else assert_ragged_equals_alone(toy)
    assert found.gm is not None and called(found.gm.graph, "setitem")


def in_another_order(self: Cached, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """At the places of the call's tokens, the last one first."""
    places = torch.arange(length)
    self.keys[:1, places[length - 1 - places]] = k
    return self.keys[:1, :length], v


def test_places_in_another_order_are_not_taken_for_those_that_are_read() -> None:
    with pytest.raises(MadeOfLength, match="is made from the number of tokens and depends on the number of tokens"):
        rewrite_of(Toy(Cached(in_another_order)))
