"""Keys and values before they were repeated over query heads: every spelling is undone, no other order is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.graphs import Toy, assert_ragged_equals_alone

Repeat = Callable[[Tensor], Tensor]


def attending(repeat_key: Repeat, repeat_value: Repeat) -> Toy:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat_key(k), repeat_value(v), is_causal=True)

    return Toy(attend)


def expand_reshape(x: Tensor) -> Tensor:
    batch, heads, tokens, dim = x.shape
    return x[:, :, None, :, :].expand(batch, heads, 2, tokens, dim).reshape(batch, heads * 2, tokens, dim)


def through_rows(x: Tensor) -> Tensor:
    """[1, T, heads, dim] is what is repeated."""
    return x.transpose(1, 2).repeat_interleave(2, dim=2).transpose(1, 2)


def without_batch(x: Tensor) -> Tensor:
    return x.squeeze(0).permute(1, 0, 2).unsqueeze(2).repeat(1, 1, 2, 1).flatten(1, 2).movedim(0, 1).unsqueeze(0)


SPELLINGS: dict[str, Repeat] = {
    "expand, reshape": expand_reshape,
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "repeat_interleave(dim=)": lambda x: x.repeat_interleave(2, dim=1),
    "torch.repeat_interleave": lambda x: torch.repeat_interleave(x, 2, dim=1),
    "torch.repeat_interleave(repeats=)": lambda x: torch.repeat_interleave(x, repeats=2, dim=1),
    "broadcast_to, flatten": lambda x: torch.broadcast_to(x[:, :, None], (1, 2, 2, x.shape[2], 8)).flatten(1, 2),
    "expand_as": lambda x: x.unsqueeze(2).expand_as(torch.empty(1, 2, 2, x.shape[2], 8)).reshape(1, 4, -1, 8),
    "index list": lambda x: x[:, [0, 0, 1, 1]],
    "unsqueeze, repeat, view": lambda x: x.unsqueeze(2).repeat(1, 1, 2, 1, 1).view(1, 4, -1, 8),
    "on rows": through_rows,
    "without the batch dim": without_batch,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_undone(name: str) -> None:
    result = assert_ragged_equals_alone(attending(SPELLINGS[name], SPELLINGS[name]))
    assert result.specs[0].num_kv_heads == 2, result.gm and result.gm.graph


def test_keys_and_values_may_be_spelled_differently() -> None:
    result = assert_ragged_equals_alone(attending(SPELLINGS["index list"], expand_reshape))
    assert result.specs[0].num_kv_heads == 2


OTHER_ORDERS: dict[str, Repeat] = {
    "tiled": lambda x: x.repeat(1, 2, 1, 1),
    "tiled by index": lambda x: x[:, [0, 1, 0, 1]],
    "swapped": lambda x: x[:, [1, 1, 0, 0]],
    "uneven": lambda x: x[:, [0, 0, 0, 1]],
    "second copy flipped": lambda x: torch.stack([x, x.flip(-1)], 2).flatten(1, 2),
    "second copy doubled": lambda x: x.repeat_interleave(2, 1) * torch.tensor([1.0, 2.0, 1.0, 2.0])[:, None, None],
}


@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_another_order_is_not_undone(name: str) -> None:
    repeat = OTHER_ORDERS[name]
    assert assert_ragged_equals_alone(attending(repeat, repeat)).specs[0].num_kv_heads == 4


def test_one_tiled_operand_keeps_both_as_attention_receives_them() -> None:
    tiled = OTHER_ORDERS["tiled"]
    assert assert_ragged_equals_alone(attending(expand_reshape, tiled)).specs[0].num_kv_heads == 4
    assert assert_ragged_equals_alone(attending(tiled, expand_reshape)).specs[0].num_kv_heads == 4


def test_what_is_not_a_shape_operation_is_left_alone() -> None:
    stacked: Repeat = lambda x: torch.stack([x, x], 2).flatten(1, 2)  # noqa: E731
    assert assert_ragged_equals_alone(attending(stacked, stacked)).specs[0].num_kv_heads == 4


def test_one_head_repeated_four_times() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k.expand(-1, 4, -1, -1), v.repeat(1, 4, 1, 1), is_causal=True)

    assert assert_ragged_equals_alone(Toy(attend, kv_heads=1)).specs[0].num_kv_heads == 1


@pytest.mark.parametrize("part", ["whole", "view"])
def test_an_in_place_change_after_the_repetition_is_kept(part: str) -> None:
    def changed(x: Tensor) -> Tensor:
        repeated = x.repeat_interleave(2, 1)
        (repeated if part == "whole" else repeated[:, 1]).mul_(2.0)
        return repeated

    result = assert_ragged_equals_alone(attending(changed, changed))
    assert result.specs[0].num_kv_heads == 4


def test_an_in_place_change_before_the_repetition_is_kept_too() -> None:
    def changed(x: Tensor) -> Tensor:
        x[..., :4].mul_(2.0)
        return expand_reshape(x)

    assert assert_ragged_equals_alone(attending(changed, changed)).specs[0].num_kv_heads == 2


@pytest.mark.parametrize("passed_on", [lambda x: x, lambda x: x.to(x.device), lambda x: x.to(device="cpu")])
def test_layers_that_repeat_the_same_keys_each_for_itself_share_them(passed_on: Repeat) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        first = F.scaled_dot_product_attention(q, expand_reshape(k), expand_reshape(v), is_causal=True)
        keys, values = expand_reshape(passed_on(k)), expand_reshape(passed_on(v))
        return F.scaled_dot_product_attention(first, keys, values, is_causal=True)

    result = assert_ragged_equals_alone(Toy(attend))
    assert [(spec.num_kv_heads, spec.kv_layer) for spec in result.specs] == [(2, 0), (2, 0)]


@pytest.mark.parametrize("part", [lambda x: x[:, 1::2], lambda x: x.chunk(2, 1)[1], lambda x: x[:, 1:].clone()])
def test_layers_that_take_the_same_heads_each_for_itself_share_them(part: Repeat) -> None:
    """As in a decoder whose layers split the keys and values of one layer for differential attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        k[..., :4].mul_(2.0)  # before either layer
        first = F.scaled_dot_product_attention(q, part(k).repeat_interleave(4, 1), part(v).repeat_interleave(4, 1), is_causal=True)
        other = F.scaled_dot_product_attention(first, part(k).repeat_interleave(4, 1), v[:, :1].repeat_interleave(4, 1), is_causal=True)
        return F.scaled_dot_product_attention(other, part(k).repeat_interleave(4, 1), part(v).repeat_interleave(4, 1), is_causal=True)

    result = assert_ragged_equals_alone(Toy(attend))
    assert [(spec.num_kv_heads, spec.kv_layer) for spec in result.specs] == [(1, 0), (1, 1), (1, 0)]


def test_a_copy_made_before_a_change_is_not_shared_with_one_after_it() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        k = k * 1.0
        before = k[:, 1:].clone()
        k.mul_(2.0)
        values = v[:, 1:].repeat_interleave(4, 1)
        first = F.scaled_dot_product_attention(q, before.repeat_interleave(4, 1), values, is_causal=True)
        return F.scaled_dot_product_attention(first, k[:, 1:].clone().repeat_interleave(4, 1), values, is_causal=True)

    result = assert_ragged_equals_alone(Toy(attend))
    assert [spec.kv_layer for spec in result.specs] == [0, 1]


@pytest.mark.parametrize("repeat", [expand_reshape, lambda x: x])
@pytest.mark.parametrize("copied", [lambda x: x.clone(), lambda x: x * 1.0])
def test_keys_changed_in_between_are_not_shared(repeat: Repeat, copied: Repeat) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        k = copied(k)
        q = q[:, : repeat(k).shape[1]]
        first = F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True)
        k.mul_(2.0)
        second = F.scaled_dot_product_attention(first, repeat(k), repeat(v), is_causal=True)
        return torch.cat([second] * (4 // second.shape[1]), 1)

    result = assert_ragged_equals_alone(Toy(attend))
    assert [spec.kv_layer for spec in result.specs] == [0, 1]
