"""Cuts requests of any length into chunks of one size; a recurrence proceeds from chunk to chunk, for all requests in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import copy_together
from paged_attn.attn_ops.scans.state_segments import ChunkBounds, StateSegments


@dataclass(frozen=True)
class Chunks:
    """E requests, in S segments, as N chunks of `size` tokens; the last chunk of each segment is padded.

    Attributes:
        rows: [N, size] int64, rows of the batch; 0 for padding.
        real: [N, size] bool, false for padding.
        targets, indices: [tokens] int64: for each real token its row in the batch, and its index among all N * size of the chunks.
        order: [E] int64, the requests, those with the most chunks first.
        waves: the i-th chunks of all requests that have so many, as int64 indices, in that order.
        ends: for each wave, which of its chunks end a segment (indices into the wave), and which segments these are, both int64.
        num_segments: S.
    """

    rows: Tensor
    real: Tensor
    targets: Tensor
    indices: Tensor
    order: Tensor
    waves: Sequence[Tensor]
    ends: Sequence[tuple[Tensor, Tensor]]
    num_segments: int

    @classmethod
    def of(cls, segments: StateSegments, size: int, device: torch.device) -> Chunks:
        bounds = ChunkBounds.of(segments, size)
        first, counts = bounds.requests
        real = np.arange(size) < bounds.counts[:, None]
        rows = np.where(real, bounds.rows[:, None] + np.arange(size), 0)
        order = np.argsort(-counts, kind="stable")
        waves = [first[order][counts[order] > wave] + wave for wave in range(counts.max())]
        ending = [(bounds.ends[wave] >= 0).nonzero()[0] for wave in waves]
        ended = [bounds.ends[wave[at]] for wave, at in zip(waves, ending, strict=True)]
        arrays = (rows, real, rows[real], np.flatnonzero(real), order, *map(np.concatenate, (waves, ending, ended)))
        parts = copy_together(arrays, device)
        of_waves, at_ends = [len(wave) for wave in waves], [len(at) for at in ending]
        ends = tuple(zip(parts[6].split(at_ends), parts[7].split(at_ends), strict=True))
        return cls(parts[0], parts[1], parts[2], parts[3], parts[4], parts[5].split(of_waves), ends, len(segments.lengths))

    def gather(self, values: Tensor) -> Tensor:
        """values [T, H, ...] as float32 [N, H, size, ...], zero for padding."""
        found = values[self.rows].float()
        found = torch.where(self.real.view(*self.real.shape, *[1] * (found.dim() - 2)), found, found.new_zeros(()))
        return found.transpose(1, 2)

    def scatter(self, result: Tensor, output: Tensor) -> None:
        """Write float32 [N, size, ...] to the rows of output [T, ...]."""
        output[self.targets] = result.flatten(0, 1)[self.indices].to(output.dtype)

    def keep(self, wave: int, now: Tensor, kept: Tensor) -> None:
        """Of the float32 states `now` after a wave, in its order, copy those at the ends of segments to `kept` [S, ...]. Their requests
        continue from the rounded values, as requests do that start there."""
        at, segments = self.ends[wave]
        if not len(at):
            return
        kept[segments] = now[at].to(kept.dtype)
        if kept.dtype != now.dtype:
            now[at] = kept[segments].to(now.dtype)


def scan_chunks(
    chunks: Chunks, states: Tensor, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, decay: Tensor, reads: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each request's chunks in order, from its state S [K, V]: v = value - reads S; output = query S + scores v; S = decay S + key^T v.

    All in float32, except the states [E, H, K, V]; query, key, reads [N, H, size, K]; value [N, H, size, V]; scores [N, H, size, size];
    decay [N, H, K or 1, 1]. Returns the output [N, H, size, V], and the states after each segment [S, H, K, V] in their dtype.
    """
    output, now = torch.empty_like(value), states[chunks.order].float()
    kept = states.new_empty(chunks.num_segments, *states.shape[1:])
    for index, wave in enumerate(chunks.waves):
        before, new = now[: len(wave)], value[wave]
        if reads is not None:
            new = new - reads[wave] @ before
        output[wave] = query[wave] @ before + scores[wave] @ new
        now[: len(wave)] = before * decay[wave] + key[wave].transpose(-1, -2) @ new
        chunks.keep(index, now, kept)
    return output, kept
