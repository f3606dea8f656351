"""Keys that are computed on after they were repeated (Falcon): equal heads are found by value, unequal ones are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.passes.find.sdpa import find_sdpa
from paged_attn.passes.replace.kv_heads import has_equal_heads
from tests.passes.graphs import Toy, Traced, assert_ragged_equals_alone, trace


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None, :, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


KEYS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "repeated, then rotated": (lambda k, pos: rotate(k.repeat_interleave(2, 1), pos), True),
    "repeated, then normalised": (lambda k, pos: F.layer_norm(k.repeat_interleave(2, 1), (8,)), True),
    "tiled, then rotated": (lambda k, pos: rotate(k.repeat(1, 2, 1, 1), pos), False),
    "rotated by head": (
        lambda k, pos: rotate(k.repeat_interleave(2, 1), pos) * torch.tensor([1.0, 1.0, 1.0, 1.001]).view(1, 4, 1, 1), False
    ),
    "rotated by head and row": (
        lambda k, pos: rotate(k.repeat_interleave(2, 1), pos) + torch.tensor([0.0, 1.0, 0.0, 0.0]).view(1, 4, 1, 1) * (pos == 1)[..., None],
        False,
    ),
}  # fmt: skip


def toy(name: str) -> Toy:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        keys = KEYS[name][0](k, pos)
        return F.scaled_dot_product_attention(rotate(q, pos), keys, v.repeat_interleave(2, 1), is_causal=True)

    return Toy(attend)


@pytest.mark.parametrize("name", KEYS)
def test_equal_heads_are_merged_and_others_are_not(name: str) -> None:
    result = assert_ragged_equals_alone(toy(name))
    assert result.specs[0].num_kv_heads == (2 if KEYS[name][1] else 4)


def test_runs_of_equal_heads_must_divide_the_heads() -> None:
    def work(traced: Traced) -> list[bool]:
        (site,) = find_sdpa(traced.gm.graph, traced.form)
        return [has_equal_heads(site.key, site.node, n, traced.form, traced.values) for n in (1, 2, 3, 4)]

    assert trace(toy("repeated, then rotated"), work).result == [False, True, False, True]
