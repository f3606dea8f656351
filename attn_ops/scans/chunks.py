"""Requests of any lengths cut into chunks of one size, and a recurrence that goes from chunk to chunk, all requests side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunks:
    """E requests as N chunks of `size` tokens, a request's last one filled up.

    Attributes:
        rows: [N, size] int64, of the batch; row 0 where a chunk is filled up.
        real: [N, size] bool, false where it is filled up.
        targets, indices: [tokens] int64: of each real token its row in the batch, and its index among all N * size of the chunks.
        order: [E] int64, the requests, those of most chunks first.
        waves: the i-th chunks of all requests that have so many, as int64 indices, in that order.
    """

    size: int
    rows: Tensor
    real: Tensor
    targets: Tensor
    indices: Tensor
    order: Tensor
    waves: Sequence[Tensor]

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int], size: int, device: torch.device) -> Chunks:
        new = np.array(lengths)
        counts = -(-new // size)
        first = np.add.accumulate(counts) - counts
        owner = np.arange(len(new)).repeat(counts)
        position = (np.arange(counts.sum()) - first[owner])[:, None] * size + np.arange(size)
        real = position < new[owner][:, None]
        rows = np.where(real, np.array(starts)[owner][:, None] + position, 0)
        order = np.argsort(-counts, kind="stable")
        waves = [first[order][counts[order] > wave] + wave for wave in range(counts.max())]
        arrays = (rows, real, rows[real], np.flatnonzero(real), order, np.concatenate(waves))
        parts = [torch.from_numpy(each).to(device, non_blocking=True) for each in arrays]
        lengths_of_waves = [len(wave) for wave in waves]
        return cls(size, parts[0], parts[1], parts[2], parts[3], parts[4], parts[5].split(lengths_of_waves))

    def gather(self, values: Tensor) -> Tensor:
        """values [T, H, ...] as float32 [N, H, size, ...], zero where a chunk is filled up."""
        found = values[self.rows].float()
        found = torch.where(self.real.view(*self.real.shape, *[1] * (found.dim() - 2)), found, found.new_zeros(()))
        return found.transpose(1, 2)

    def scatter(self, result: Tensor, output: Tensor) -> None:
        """Write float32 [N, size, ...] to the rows of output [T, ...]."""
        output[self.targets] = result.flatten(0, 1)[self.indices].to(output.dtype)


def scan_chunks(
    chunks: Chunks, states: Tensor, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, decay: Tensor, reads: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of each request's chunks in turn, from its state S [K, V]: v = value - reads S; output = query S + scores v; S = decay S + key^T v.

    All in float32. states [E, H, K, V]; query, key, reads [N, H, size, K]; value [N, H, size, V]; scores [N, H, size, size]; decay
    [N, H, K or 1, 1]. Returns the output [N, H, size, V] and the states after it.
    """
    output, now = torch.empty_like(value), states[chunks.order]
    for wave in chunks.waves:
        before, new = now[: len(wave)], value[wave]
        if reads is not None:
            new = new - reads[wave] @ before
        output[wave] = query[wave] @ before + scores[wave] @ new
        now[: len(wave)] = before * decay[wave] + key[wave].transpose(-1, -2) @ new
    after = torch.empty_like(now)
    after[chunks.order] = now
    return output, after
