"""Texts that are embedded or scored: their parameters, and their hidden-state rows, which are added up over the steps of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from paged_attn.engine.sampling.sampler_output import HostCopies
from paged_attn.shown import shown
from paged_attn.truncation import checked_truncation

PoolingKind: TypeAlias = Literal["last", "mean", "cls"]
KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)


@dataclass(frozen=True)
class PoolingParams:
    """Parameters for one text.

    Attributes:
        pooling: "last" and "cls" take the hidden state of the last and of the first token, "mean" the mean over all of them.
        token_types: of each token, for models that read two texts at once; None: 0 for all.
        truncate_prompt_tokens: of a longer text only the first so many tokens count; -1: as many as there is room for.

    Raises:
        ValueError: another pooling, or a number of tokens that is none.
    """

    pooling: PoolingKind
    token_types: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        checked_truncation(self.truncate_prompt_tokens)
        if self.pooling not in KINDS:
            raise ValueError(f"pooling: got {shown(self.pooling)}; allowed: {', '.join(map(repr, KINDS))}")


class PooledPart(NamedTuple):
    """Tokens `start` to `end` of one text: what a step adds. Their rows are `first_row` and after; for "last" the one of `end` - 1 alone,
    for "cls" the first one counts."""

    pooling: PoolingKind
    first_row: int
    start: int
    end: int


class PooledRows:
    """What the parts of one step come to; the copy to the host starts at once, and nothing here waits but `wait`. `rows`: [N, W], any
    floating dtype; they may be overwritten afterwards."""

    def __init__(self, rows: Tensor, parts: Sequence[PooledPart]) -> None:
        self._parts = parts
        self._copies = HostCopies([torch.stack([_pooled(rows.detach(), part) for part in parts])])

    def wait(self) -> list[tuple[PooledPart, Tensor]]:
        """Each part with its row [W] float32."""
        return list(zip(self._parts, self._copies.wait()[0].unbind(), strict=True))


def _pooled(rows: Tensor, part: PooledPart) -> Tensor:
    if part.pooling != "mean":
        return rows[part.first_row].float()
    return rows[part.first_row : part.first_row + part.end - part.start].sum(0, dtype=torch.float32)


class Pooled:
    """What has come of one text so far. A part that comes again, as its text was preempted, takes the place of those from its start on."""

    def __init__(self, params: PoolingParams) -> None:
        self.params = params
        self._chunks: list[tuple[int, int, Tensor]] = []

    def add(self, part: PooledPart, row: Tensor) -> None:
        self._chunks = [*(chunk for chunk in self._chunks if chunk[0] < part.start), (part.start, part.end, row)]

    def result(self, num_tokens: int) -> Tensor:
        """[W] float32 of a text of so many tokens, all of which have come."""
        if self.params.pooling != "mean":
            return self._chunks[-1 if self.params.pooling == "last" else 0][2]
        assert sum(end - start for start, end, _ in self._chunks) == num_tokens, "the parts of a mean do not cover the text"
        return (torch.stack([row for *_, row in self._chunks]).sum(0, dtype=torch.float64) / num_tokens).float()
