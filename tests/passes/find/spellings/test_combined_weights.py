"""Weights of several softmaxes, or of several heads, that are added up before they meet the values: each is attention of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.specs.recompute import RecomputeSpec
from paged_attn.passes.find.attention_site import UnknownAttention
from tests.passes.graphs import Toy, assert_ragged_equals_alone, rewrite_of
from tests.passes.written_out import SCALE, WithPositions, mask

FACTORS = torch.tensor([0.3, -0.7])[:, None, None]


def weights(q: Tensor, k: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-1, -2) * SCALE + mask(q), -1)


def of_pairs(w: Tensor) -> Tensor:
    w = w.view(1, 2, 2, w.shape[-2], w.shape[-1])
    return w[:, :, 0] - FACTORS * w[:, :, 1]


def strided(w: Tensor) -> Tensor:
    return (w[:, 0::2] - w[:, 1::2] * 0.4).to(torch.float32)


def of_halves(w: Tensor) -> Tensor:
    return F.dropout(w[:, :2].contiguous() + w[:, 2:] / 3, 0.1, False)


def of_chunks(w: Tensor) -> Tensor:
    one, other = w.chunk(2, dim=1)
    return torch.sub(one, 0.5 * other)


@pytest.mark.parametrize("heads", [slice(1, 3), slice(1, 2)])  # each head has its own values, or all have the same
@pytest.mark.parametrize("combined", [of_pairs, strided, of_halves, of_chunks])
def test_differential_attention_is_one_layer_of_all_heads(combined: Callable[[Tensor], Tensor], heads: slice) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (combined(weights(q, k)) @ v[:, heads]).repeat(1, 2, 1, 1)

    (spec,) = assert_ragged_equals_alone(Toy(WithPositions(attend), kv_heads=4)).specs
    assert (spec.num_q_heads, spec.causal, spec.scale) == (4, True, pytest.approx(SCALE))


def test_two_softmaxes_are_two_layers() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (weights(q, k) - 0.2 * weights(q.flip(-1), k)) @ v

    assert len(assert_ragged_equals_alone(Toy(WithPositions(attend), kv_heads=4)).specs) == 2


def by_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = weights(q, k)
    return (w - w.flip(1) * torch.sigmoid(k[..., 0])[:, :, None]) @ v  # a factor of each key


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = weights(q, k)
    return (w.mul_(0.5) - weights(q.flip(-1), k)) @ v


def written_by_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = weights(q, k)
    combined = w - weights(q.flip(-1), k)
    w[:, 0].mul_(2.0)
    return combined @ v


def scaled_by_what_is_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    factors = torch.full((4, 1, 1), 0.3)
    combined = weights(q, k) - factors * weights(q.flip(-1), k)
    return combined @ (v * factors.mul_(2.0))


def of_some_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = weights(q, k)
    return ((w[:, 1:3] - w[:, :2]) @ v[:, :2]).repeat(1, 2, 1, 1)


@pytest.mark.parametrize("attend", [written, written_by_a_view, scaled_by_what_is_written, of_some_heads])
def test_heads_that_overlap_and_weights_written_in_place_are_refused(attend: Callable[..., Tensor]) -> None:
    with pytest.raises(UnknownAttention):
        rewrite_of(Toy(WithPositions(attend), kv_heads=4))


def test_weights_scaled_by_tokens_are_recomputed() -> None:
    (spec,) = rewrite_of(Toy(WithPositions(by_tokens), kv_heads=4)).specs
    assert isinstance(spec, RecomputeSpec)
