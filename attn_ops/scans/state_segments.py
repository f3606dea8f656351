"""Cuts requests into segments wherever a state is kept, and the segments into chunks. All arrays are on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged_attn.attn_ops.batch.requests import StateCheckpoint

Integers = NDArray[np.int64]


class StateSegments(NamedTuple):
    """E requests as S segments, one after another; a segment ends at a checkpoint or with its request.

    Attributes:
        starts, lengths: [S] int64, the first row of each in the batch, and its number of tokens.
        owners: [S] int64, the index of each segment's request.
        slots: [S] int64, where the state after each goes.
    """

    starts: Integers
    lengths: Integers
    owners: Integers
    slots: Integers

    @classmethod
    def of(
        cls, starts: Sequence[int], lengths: Sequence[int], slots: Sequence[int], checkpoints: Mapping[int, Sequence[StateCheckpoint]]
    ) -> StateSegments:
        if not checkpoints:
            return cls(_integers(starts), _integers(lengths), np.arange(len(lengths)), _integers(slots))
        rows = []
        for owner, (start, length, slot) in enumerate(zip(starts, lengths, slots, strict=True)):
            before = 0
            for end, target in (*checkpoints.get(owner, ()), (length, slot)):
                rows.append((start + before, end - before, owner, target))
                before = end
        return cls(*np.array(rows, np.int64).T)

    def by_request(self, counts: Integers) -> Integers:
        """[2, E]: each request's first item, and how many it has, if its segments have `counts` [S] items in order."""
        whole = self.owners[-1] == len(self.owners) - 1  # each request is one segment
        totals = counts if whole else np.bincount(self.owners, counts).astype(np.int64)
        found = np.empty((2, len(totals)), np.int64)
        found[0], found[1] = np.add.accumulate(totals) - totals, totals
        return found


class ChunkBounds(NamedTuple):
    """Segments as N chunks of bounded length.

    Attributes:
        rows, counts: [N] int64, the first row of each in the batch, and its number of tokens.
        ends: [N] int64, the segment that ends with it, or -1.
        requests: [2, E] int64, the first chunk of each request, and how many it has.
    """

    rows: Integers
    counts: Integers
    ends: Integers
    requests: Integers

    @classmethod
    def of(cls, segments: StateSegments, size: int) -> ChunkBounds:
        each = -(-segments.lengths // size)
        past = np.add.accumulate(each)
        owner = np.arange(len(each)).repeat(each)
        before = (np.arange(past[-1]) - (past - each)[owner]) * size
        ends = np.full(past[-1], -1)
        ends[past - 1] = np.arange(len(each))
        counts = np.minimum(segments.lengths[owner] - before, size)
        return cls(segments.starts[owner] + before, counts, ends, segments.by_request(each))


def _integers(values: Sequence[int]) -> Integers:
    return np.array(values, np.int64)
