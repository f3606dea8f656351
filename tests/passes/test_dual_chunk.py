"""Dual chunk attention, however it is written: found, proved on numbers and served; or refused with what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.dual_chunk import DUAL_CHUNK_ATTENTION
from paged_attn.attn_ops.specs.dual_chunk import DualChunkSpec
from paged_attn.passes.report import Rewrite
from tests.passes.graphs import Toy, assert_ragged_equals_alone, rewrite_of
from tests.passes.written_out import MIN, SCALE, WithPositions, repeated, visible

CHUNK = 6
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def toy(attend: Attend | nn.Module, kv_heads: int = 4) -> Toy:
    return Toy(WithPositions(attend), kv_heads=kv_heads)


def three(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In place of three rotations."""
    return q, q.flip(-1), -q


def chunks_back(q: Tensor, chunk: int = CHUNK) -> Tensor:
    of = torch.arange(q.shape[-2]) // chunk
    return of[:, None] - of


def weighted(scores: Tensor, v: Tensor) -> Tensor:
    return scores.masked_fill(~visible(v), MIN).softmax(-1) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor, chunk: int = CHUNK) -> Tensor:
    intra, successive, inter = (query @ k.transpose(2, 3) * SCALE for query in three(q))
    back = chunks_back(q, chunk)
    return weighted(torch.where(back == 0, intra, torch.where(back == 1, successive, inter)), v)


def chosen_by_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The farthest first, gathered from a stack."""
    near, next_to, far = three(q)
    scores = torch.stack([query @ k.mT for query in (far, near, next_to)]) / 4.0
    kind = torch.tensor([1, 2, 0])[chunks_back(q).clamp(0, 2)]
    return weighted(scores.gather(0, kind.expand(1, 1, 4, -1, -1))[0], v)


def multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    intra, successive, inter = (query @ k.transpose(-1, -2) for query in three(q * 0.5))
    back = chunks_back(q)
    return weighted(inter * (back > 1) + successive * (back == 1) + intra * (back == 0), v)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    intra, successive, inter = (query @ k.transpose(-1, -2) for query in three(q))
    scores = torch.where(chunks_back(q) == 1, successive, torch.where(chunks_back(q) == 0, intra, inter))
    scores *= SCALE
    scores.masked_fill_(~visible(q), float("-inf"))
    return scores.softmax(-1) @ v


def repeated_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return chosen(q, repeated(k), repeated(v))


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries of a group are a dim of their own; keys are not repeated."""
    intra, successive, inter = (torch.einsum("bkgtd,bksd->bkgts", query.unflatten(1, (2, 2)), k) * SCALE for query in three(q))
    back = chunks_back(q)
    scores = torch.where(back == 0, intra, torch.where(back == 1, successive, inter)).masked_fill(~visible(q), MIN)
    return torch.einsum("bkgts,bksd->bkgtd", scores.softmax(-1), v).flatten(1, 2)


def parts(q: Tensor, k: Tensor, v: Tensor, hidden: float = MIN) -> tuple[list[Tensor], list[Tensor]]:
    outputs, sums = [], []
    back = chunks_back(q)
    for query, seen in zip(three(q), (back == 0, back == 1, back > 1), strict=True):
        scores = (query @ k.transpose(-1, -2) * SCALE).masked_fill(~(seen & visible(q)), hidden)
        outputs.append(torch.softmax(scores, -1) @ v)
        sums.append(torch.logsumexp(scores, -1))
    return outputs, sums


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outputs, sums = parts(q, k, v)
    return (torch.stack(sums).softmax(0)[..., None] * torch.stack(outputs)).sum(0)


def merged_one_after_the_other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Parts of which a query sees nothing are -inf, and their outputs NaN until they are replaced."""
    outputs, sums = parts(q, k, v, float("-inf"))
    largest = torch.maximum(torch.maximum(sums[0], sums[1]), sums[2])
    weights = [torch.exp(each - largest)[..., None] for each in sums]
    total = sum(weight * output.nan_to_num(0.0) for weight, output in zip(weights, outputs, strict=True))
    return total / (weights[0] + weights[1] + weights[2])


SPELLINGS: dict[str, tuple[Attend, int, float]] = {
    "chosen": (chosen, 4, SCALE), "chosen by number": (chosen_by_number, 4, 0.25), "multiplied": (multiplied, 4, 1.0),
    "in place": (in_place, 4, SCALE), "repeated heads": (repeated_heads, 2, SCALE), "grouped": (grouped, 2, SCALE),
    "merged": (merged, 4, SCALE), "merged one after the other": (merged_one_after_the_other, 4, SCALE),
}  # fmt: skip


def specs_of(result: Rewrite) -> DualChunkSpec:
    (spec,) = result.specs
    assert isinstance(spec, DualChunkSpec) and result.gm is not None
    assert [node.target for node in result.gm.graph.nodes if "paged_attn" in str(node.target)] == [DUAL_CHUNK_ATTENTION]
    assert not [node for node in result.gm.graph.nodes if any(word in node.name for word in ("softmax", "stand_in", "where"))]
    return spec


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_runs_ragged(name: str) -> None:
    attend, kv_heads, scale = SPELLINGS[name]
    spec = specs_of(assert_ragged_equals_alone(toy(attend, kv_heads)))
    assert (spec.num_q_heads, spec.num_kv_heads, spec.chunk) == (4, kv_heads, CHUNK)
    assert spec.scale == pytest.approx(scale, rel=1e-9)


@pytest.mark.parametrize("chunk", [2, 20, 24, 32768])
def test_chunks_of_any_length(chunk: int) -> None:
    """Above 20 they are seen on probes that scale them down."""
    spec = specs_of(assert_ragged_equals_alone(toy(lambda q, k, v: chosen(q, k, v, chunk)), lengths=(5, 61, 50)))
    assert spec.chunk == chunk


def test_what_is_said_of_it() -> None:
    (layer,) = rewrite_of(toy(chosen)).layers
    assert layer.found_by == "softmax of three products"
    assert layer.proof.startswith("output evaluated on 5 probes = softmax of intra, successive, inter products, chunk 6, scale 0.3536; ")
    assert rewrite_of(toy(merged)).layers[0].found_by == "three softmaxes, merged by log-sum-exps"


class HeadScales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.rand(4, 1, 1) + 0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return weighted(self.scales * sum_of(q, k), v)


def sum_of(q: Tensor, k: Tensor, change: Callable[..., Tensor] | None = None) -> Tensor:
    """The scores of dual chunk attention; `change` makes something else of (distance in chunks, i - j, the three products)."""
    products = [query @ k.transpose(2, 3) * SCALE for query in three(q)]
    back, i = chunks_back(q), torch.arange(q.shape[-2])
    if change is not None:
        return change(back, i[:, None] - i, *products)
    return torch.where(back == 0, products[0], torch.where(back == 1, products[1], products[2]))


@dataclass(frozen=True)
class Changed:
    """An attention whose scores are others."""

    change: Callable[..., Tensor]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return weighted(sum_of(q, k, self.change), v)


def bidirectional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sum_of(q, k).softmax(-1) @ v


def three_plain_attentions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Merged by their log-sum-exps, but each sees all."""
    outputs, sums = [], []
    for query in three(q):
        scores = (query @ k.transpose(-1, -2) * SCALE).masked_fill(~visible(q), MIN)
        outputs.append(scores.softmax(-1) @ v)
        sums.append(scores.logsumexp(-1))
    return (torch.stack(sums).softmax(0)[..., None] * torch.stack(outputs)).sum(0)


def where(*choices: Any) -> Tensor:
    *pairs, last = choices
    for condition, value in zip(reversed(pairs[::2]), reversed(pairs[1::2]), strict=True):
        last = torch.where(condition, value, last)
    assert isinstance(last, Tensor)
    return last


LOOK_ALIKES: dict[str, tuple[Attend | nn.Module, str]] = {
    "windows": (Changed(lambda back, d, a, b, c: where(d < 6, a, d < 12, b, c)), "another than the formula's"),
    "chunks of unequal length": (Changed(lambda back, d, a, b, c: where(back == 0, a, back < 3, b, c)), "first count in rows"),
    "far chunks are hidden": (Changed(lambda back, d, a, b, c: where(back == 0, a, back == 1, b, back < 4, c, MIN)), "another than"),
    "products meet": (Changed(lambda back, d, a, b, c: where(back == 0, a, back == 1, torch.maximum(b, c), c)), "another than|first count"),
    "softcap": (Changed(lambda back, d, a, b, c: where(back == 0, a, back == 1, b, c).tanh() * 0.5), "another than"),
    "bias": (Changed(lambda back, d, a, b, c: where(back == 0, a, back == 1, b, c) - 0.1 * d), "another than"),
    "a scale of each head": (HeadScales(), "another than"),
    "a number that shows nowhere": (
        Changed(lambda back, d, a, b, c: where(back == 0, a, back == 1, b, c).clamp(max=1000.0)), "holds 1000, which small",
    ),
    "it sees later tokens": (bidirectional, "first count in rows"),
    "three plain attentions": (three_plain_attentions, "first count in rows"),
    "two products": (Changed(lambda back, d, a, b, c: where(back == 0, a, b)), "the sum of 2 products"),
    "keys of their own": (
        lambda q, k, v: weighted(where(chunks_back(q) == 0, q @ k.mT, chunks_back(q) == 1, q @ (2 * k).mT, q @ (-k).mT), v),
        "the sum of 3 products",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_only_looks_like_it_is_refused(name: str) -> None:
    attend, why = LOOK_ALIKES[name]
    with pytest.raises(UnsupportedError, match=why):
        rewrite_of(toy(attend))
