"""Scores that are a sum of products of tokens with tokens are the scores of one product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paged_attn.passes.find.attention_site import UnknownAttention
from tests.passes.graphs import Toy, assert_ragged_equals_alone, rewrite_of
from tests.passes.written_out import WithPositions, mask


def weights(scores: Tensor) -> Tensor:
    return (scores + mask(scores)).softmax(-1)


def added(q: Tensor, k: Tensor) -> Tensor:
    return (q[..., :6] @ k[..., :6].mT + q[..., 6:] @ k[..., 6:].mT) * 0.25


def each_with_a_number(q: Tensor, k: Tensor) -> Tensor:
    return q[..., :6] @ k[..., :6].mT * 0.25 + (q[..., 6:] @ k[..., 6:].mT) / 4


def three(q: Tensor, k: Tensor) -> Tensor:
    return (added(q[..., :7], k[..., :7]) + q[..., 7:] @ k[..., 7:].mT / 4.0) * 1.0


def in_place(q: Tensor, k: Tensor) -> Tensor:
    scores = q[..., :6] @ k[..., :6].mT
    scores += q[..., 6:] @ k[..., 6:].mT
    scores *= 0.25
    return scores


def queries_before_heads(q: Tensor, k: Tensor) -> Tensor:
    """One head of keys in the second product, as with a rotated part that all heads share."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    scores = torch.einsum("bshd,bthd->bsht", q[..., :6], k[..., :6]) + torch.einsum("bshr,btr->bsht", q[..., 6:], k[:, :, 0, 6:])
    return (scores * 0.25).transpose(1, 2)


def grouped(q: Tensor, k: Tensor) -> Tensor:
    q, k = q.unflatten(1, (2, 2)), k.unflatten(1, (2, 2))
    return added(q, k).flatten(1, 2)


SCALES = {added: 0.25, each_with_a_number: 1.0, three: 1.0, in_place: 0.25, queries_before_heads: 0.25, grouped: 0.25}


@pytest.mark.parametrize("scores", SCALES, ids=lambda scores: scores.__name__)
def test_a_sum_is_one_product(scores: Callable[[Tensor, Tensor], Tensor]) -> None:
    toy = Toy(WithPositions(lambda q, k, v: weights(scores(q, k)) @ v), kv_heads=4)
    (spec,) = assert_ragged_equals_alone(toy).specs
    assert (spec.qk_head_dim, spec.v_head_dim) == (8, 8) and spec.scale == pytest.approx(SCALES[scores])


def test_a_factor_that_is_a_tensor_is_left_alone() -> None:
    by_head = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1, 1)
    toy = Toy(WithPositions(lambda q, k, v: weights(q @ k.mT + q.flip(-1) @ k.mT * by_head) @ v), kv_heads=4)
    with pytest.raises(UnknownAttention, match="its scores are the sum of 2 products"):
        rewrite_of(toy)
