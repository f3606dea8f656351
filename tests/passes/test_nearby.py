"""Rows that are mixed with those of a few tokens before, in the model's own operations: an op of their own, beside attention on pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn.attn_ops.specs.recompute import RecomputeSpec
from paged_attn.passes.report import Rewrite
from paged_attn.passes.runner import rewrite
from tests.passes.graphs import Toy, assert_ragged_equals_alone, rewrite_of, trace

Change = Callable[[Tensor], Tensor]  # [1, 2, T, 8] -> the same
TAPS = torch.randn(16, 1, 4, generator=torch.Generator().manual_seed(1))


class ChangedKeys(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, pos: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, self.change(k), v, is_causal=True, enable_gqa=True)


def two_taps(k: Tensor) -> Tensor:
    """Baichuan-M1's."""
    longer = F.pad(k.transpose(1, 2), (0, 0, 0, 0, 1, 0))
    return (0.3 * longer[:, :-1] + 0.7 * longer[:, 1:]).transpose(1, 2)


def channels_first(k: Tensor) -> Tensor:
    """A convolution as layers of torch have it, with as many rows more as it has taps before."""
    rows = k.transpose(1, 2).flatten(2).mT
    return F.conv1d(rows, TAPS, padding=3, groups=16)[..., : rows.shape[-1]].mT.unflatten(-1, (2, 8)).transpose(1, 2)


def two_dims(k: Tensor) -> Tensor:
    """Yuan2's, of tokens first and an empty last dim."""
    rows = k.transpose(1, 2).flatten(2).permute(1, 0, 2)
    length = rows.shape[0]
    image = rows.view(length, 1, 1, 16).permute(1, 3, 0, 2)
    mixed = F.conv2d(image, TAPS[:, :, :2, None], padding=(1, 0), groups=16)[:, :, :length]
    return (mixed.permute(2, 0, 3, 1).reshape(length, 1, 16) + rows).permute(1, 0, 2).unflatten(-1, (2, 8)).transpose(1, 2)


def differences(k: Tensor) -> Tensor:
    return k + F.pad(k[:, :, 1:] - k[:, :, :-1], (0, 0, 1, 0))


NEARBY: dict[str, tuple[Change, list[int]]] = {
    "a shift by pad": (lambda k: k + F.pad(k, (0, 0, 1, -1)), [1]),
    "a shift by cat": (lambda k: torch.cat([torch.zeros_like(k[:, :, :1]), k[:, :, :-1]], 2) - k, [1]),
    "a shift with the first row twice": (lambda k: k - torch.cat([k[:, :, :1].expand(-1, -1, 2, -1), k[:, :, :-1]], 2)[:, :, 1:], [1]),
    "two taps": (two_taps, [1]),
    "channels first": (channels_first, [3]),
    "two dims": (two_dims, [1]),
    "differences": (differences, [1]),
    "one after the other": (lambda k: channels_first(two_taps(k).exp()), [1, 3]),
    "by position": (lambda k: k + F.pad(k, (0, 0, 1, -1)) * torch.arange(k.shape[2])[:, None] * 0.1, [1]),
}
OTHERS: dict[str, Change] = {
    "the row behind": lambda k: k + F.pad(k, (0, 0, -1, 1)),
    "seventeen rows before": lambda k: k + F.pad(k, (0, 0, 17, 0))[:, :, :-17],
    "around the end": lambda k: k + k.roll(1, 2),
}


def reaches(result: Rewrite) -> list[int | None]:
    return [spec.reach for spec in result.specs if isinstance(spec, RecomputeSpec)]


@pytest.mark.parametrize("name", NEARBY)
def test_they_are_ops_of_their_own(name: str) -> None:
    change, expected = NEARBY[name]
    result = assert_ragged_equals_alone(Toy(ChangedKeys(change)))
    assert reaches(result) == expected and not isinstance(result.specs[-1], RecomputeSpec)
    assert result.layers[0].found_by == "rows of nearby tokens"


@pytest.mark.parametrize("name", OTHERS)
def test_other_mixes_are_not(name: str) -> None:
    result = rewrite_of(Toy(ChangedKeys(OTHERS[name])))
    assert result.gm is None and result.mixes is not None and reaches(result) == []


class OfEmbeddings(Toy):
    """A mix outside any module that could run by itself."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x + 0.5 * F.pad(x, (0, 0, 1, -1)) + torch.sin(position_ids[..., None] * 0.1)
        q, k, v = (linear(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.head(self.attend(q, k, v, input_ids, position_ids).transpose(1, 2).flatten(2))


def test_embeddings_that_are_shifted_in_the_models_forward() -> None:
    assert reaches(assert_ragged_equals_alone(OfEmbeddings(ChangedKeys(torch.exp)))) == [1]


def test_what_is_only_cut_to_the_tokens_is_left_alone() -> None:
    result = trace(
        Toy(ChangedKeys(lambda k: F.pad(k, (0, 0, 0, 2))[:, :, : k.shape[2]])), lambda traced: rewrite(traced.gm, traced.args, None)
    ).result
    assert result.gm is not None and reaches(result) == [] and len(result.specs) == 1
