"""Which rows of a batch continue which state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.batch.packed_ints import copy_together
from paged_attn.attn_ops.batch.requests import StateCheckpoint
from paged_attn.attn_ops.scans.chunks import Chunks
from paged_attn.attn_ops.scans.state_segments import ChunkBounds, StateSegments

Arrays = tuple[NDArray[Any], ...]  # of int64 or bool
Table = tuple[Callable[..., Arrays], tuple[int, ...]]  # a method of `Extends` that makes it, and its arguments
Wanted = dict[Table, None]  # in the order in which they were first read


@dataclass(frozen=True)
class Wave:
    """N segments of different requests, as sequences one after another.

    Attributes:
        rows: [R] int64, their rows in the batch.
        ends: [N + 1] int64, the running sum of their lengths, from 0; `ends_on_host`: the same.
        owners: [N] int64, the index of each segment's request among the extending ones.
        targets: [N] int64, the slot for the state after each.
    """

    rows: Tensor
    ends: Tensor
    ends_on_host: Tensor
    owners: Tensor
    targets: Tensor


class _Part:
    """One of the tensors of a table of `Extends`."""

    def __init__(self, make: Callable[..., Arrays], index: int) -> None:
        self._make, self._index = make, index

    def __get__(self, extends: Extends, owner: object) -> Tensor:
        return extends._table(self._make)[self._index]


@dataclass(frozen=True)
class Extends:
    """E requests with several new tokens or with their first one: rows `starts[i]` to `starts[i] + lengths[i]` continue the state in
    `slots[i]`, or begin a new one if `fresh[i]`. At least one request. States that `checkpoints[i]` names are kept on the way.

    What kernels read of them on the device is a table. One that is read for the first time is copied then, while the device may wait for
    it, and becomes `wanted`; `place` copies all tables that were wanted in earlier steps, together.

    Attributes:
        rows, owners: [N] int64: every row of these requests, in order, and its request.
        segments_on_device: [2, E] int64: each request's first segment, and how many it has.
        ends, targets: [S] int64: the row past each segment, and the slot for the state after it.
        slots_on_device, starts_on_device: [E] int64.
        continues: [E] bool: whether there is a state in the slot.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    slots: Sequence[int]
    fresh: Sequence[bool]
    device: torch.device
    checkpoints: Mapping[int, Sequence[StateCheckpoint]] = field(default_factory=dict)
    wanted: Wanted = field(default_factory=dict, compare=False)
    _placed: dict[Table, tuple[Tensor, ...]] = field(default_factory=dict, compare=False)
    _chunks: dict[int, Chunks] = field(default_factory=dict, compare=False)

    def place(self, others: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Copy all wanted tables to the device at once, and with them `others`, arrays of int64 or bool, which are returned."""
        made = {table: table[0](self, *table[1]) for table in self.wanted}
        placed = iter(copy_together([*others, *chain.from_iterable(made.values())], self.device))
        first = list(islice(placed, len(others)))
        self._placed.update({table: tuple(islice(placed, len(arrays))) for table, arrays in made.items()})
        return first

    def _table(self, make: Callable[..., Arrays], *numbers: int) -> tuple[Tensor, ...]:
        if (table := (make, numbers)) not in self._placed:
            self.wanted[table] = None
            self._placed[table] = tuple(copy_together(make(self, *numbers), self.device))
        return self._placed[table]

    @cached_property
    def segments(self) -> StateSegments:
        """The requests cut at their checkpoints."""
        return StateSegments.of(self.starts, self.lengths, self.slots, self.checkpoints)

    def _make_rows(self) -> Arrays:
        lengths, starts = np.array(self.lengths), np.array(self.starts)
        owners, before = np.arange(len(lengths)).repeat(lengths), np.add.accumulate(lengths) - lengths
        return np.arange(len(owners)) + (starts - before)[owners], owners

    rows = _Part(_make_rows, 0)
    owners = _Part(_make_rows, 1)

    def _make_segments(self) -> Arrays:
        segments = self.segments
        return segments.by_request(np.ones_like(segments.lengths)), segments.starts + segments.lengths, segments.slots

    segments_on_device = _Part(_make_segments, 0)
    ends = _Part(_make_segments, 1)
    targets = _Part(_make_segments, 2)

    def _make_states(self) -> Arrays:
        return np.array(self.slots, np.int64), ~np.array(self.fresh, np.bool_), np.array(self.starts, np.int64)

    slots_on_device = _Part(_make_states, 0)
    continues = _Part(_make_states, 1)
    starts_on_device = _Part(_make_states, 2)

    @cached_property
    def waves(self) -> Sequence[Wave]:
        """The first segments of all requests, then the second segments of those that have two, and so on."""
        segments, arrays, ends_on_host = self.segments, list[NDArray[Any]](), list[Tensor]()
        first, counts = segments.by_request(np.ones_like(segments.lengths))
        for turn in range(counts.max()):
            now = first[counts > turn] + turn
            lengths = segments.lengths[now]
            ends = np.add.accumulate(np.insert(lengths, 0, 0))
            rows = (segments.starts[now] - ends[:-1]).repeat(lengths) + np.arange(ends[-1])
            arrays += [rows, ends, segments.owners[now], segments.slots[now]]
            ends_on_host.append(torch.from_numpy(ends))
        placed = copy_together(arrays, self.device)
        parts = zip(placed[::4], placed[1::4], ends_on_host, placed[2::4], placed[3::4], strict=True)
        return [Wave(*part) for part in parts]

    def before(self, states: Tensor, initial: float = 0.0) -> Tensor:
        """The states [E, ...] that the requests start from; `initial` for fresh ones."""
        found = states[self.slots_on_device]
        return torch.where(self.continues.view(-1, *[1] * (found.dim() - 1)), found, found.new_full((), initial))

    def chunks(self, size: int) -> Chunks:
        """The requests cut into chunks of `size` tokens; computed once for all layers of a step."""
        if size not in self._chunks:
            self._chunks[size] = Chunks.of(self.segments, size, self.device)
        return self._chunks[size]

    def bounds(self, size: int) -> tuple[Tensor, Tensor]:
        """int64: [2, E], each request's first chunk of `chunks(size)`, and how many it has; [N, 3], each chunk's first row, its number of
        tokens, and the slot for the state after it (0: none is kept)."""
        requests, chunks = self._table(Extends._make_bounds, size)
        return requests, chunks

    def _make_bounds(self, size: int) -> Arrays:
        bounds = ChunkBounds.of(self.segments, size)
        chunks = np.empty((len(bounds.rows), 3), np.int64)
        chunks[:, 0], chunks[:, 1] = bounds.rows, bounds.counts
        chunks[:, 2] = np.where(bounds.ends >= 0, self.segments.slots[bounds.ends], 0)
        return bounds.requests, chunks

    def taps(self, count: int, width: int) -> tuple[Tensor, Tensor]:
        """Indices of the last `count` tokens up to every row [N, count], including its own, and of the last `width` of each segment
        [S, width].

        They are int64 indices into [E * width + N, ...]: first the `width` tokens that each request's state remembers, then its new ones,
        in the order of `rows`.
        """
        taps, last = self._table(Extends._make_taps, count, width)
        return taps, last

    def _make_taps(self, count: int, width: int) -> Arrays:
        lengths = np.array(self.lengths)
        owner, ends = np.arange(len(lengths)).repeat(lengths), np.add.accumulate(lengths)
        first = len(lengths) * width + ends - lengths  # index of each request's first new token
        position = np.arange(ends[-1]) - (ends - lengths)[owner]
        taps = position[:, None] + np.arange(1 - count, 1)
        segments = self.segments
        past = segments.starts + segments.lengths - np.array(self.starts)[segments.owners]
        last = past[:, None] + np.arange(-width, 0)
        of_rows, of_segments = (
            np.where(at >= 0, first[who][:, None] + at, who[:, None] * width + width + at)
            for at, who in ((taps, owner), (last, segments.owners))
        )
        return of_rows, of_segments


@dataclass(frozen=True)
class StateRows:
    """The rows of some requests of a batch, each with its slot.

    Attributes:
        decode_rows: [D] int64, rows of requests with one new token and a state; None: the first D rows, in order.
        decode_slots: [D] integers, their slots; 0 for a row without a request, whose output is zero.
        extends: the other requests; None: there are none, and nothing here depends on the host.
    """

    decode_rows: Tensor | None
    decode_slots: Tensor
    extends: Extends | None

    @property
    def num_decode(self) -> int:
        return self.decode_slots.shape[0]

    def decoding(self, values: Tensor) -> Tensor:
        """The decoding rows [D, ...] of values [T, ...]."""
        return values[: self.num_decode] if self.decode_rows is None else values[self.decode_rows]

    def put_decoded(self, output: Tensor, result: Tensor) -> None:
        """Write the result [D, ...] of the decoding rows to those rows of output [T, ...]."""
        real = (self.decode_slots > 0).view(-1, *[1] * (result.dim() - 1))
        result = torch.where(real, result.to(output.dtype), output.new_zeros(()))
        if self.decode_rows is None:
            output[: self.num_decode] = result
        else:
            output[self.decode_rows] = result

    @classmethod
    def of(cls, batch: Batch, wanted: Wanted | None = None) -> StateRows:
        """The rows of a whole batch. If all requests decode, slots are read from the batch's device tensors, including dummies.

        Args:
            wanted: the tables that layers read of `Extends` in earlier steps; they are copied now, and those read anew are added.
        """
        rows: list[int] = []
        slots: list[int] = []
        starts, lengths, others, fresh = list[int](), list[int](), list[int](), list[bool]()
        checkpoints: dict[int, Sequence[StateCheckpoint]] = {}
        start, real = 0, batch.num_real_requests
        columns = zip(batch.query_lens_host[:real], batch.seq_lens_host, batch.state_slots_host, strict=False)
        for index, (new, seen, slot) in enumerate(columns):
            if new == 1 and seen > 1:
                rows.append(start)
                slots.append(slot)
            else:
                if index in batch.checkpoints:
                    checkpoints[len(starts)] = batch.checkpoints[index]
                starts.append(start)
                lengths.append(new)
                others.append(slot)
                fresh.append(seen == new)
            start += new
        if not starts:
            return cls(None, batch.state_slots, None)
        extends = Extends(starts, lengths, others, fresh, batch.slots.device, checkpoints, {} if wanted is None else wanted)
        decode_rows, decode_slots = extends.place([np.array(rows, np.int64), np.array(slots, np.int64)])
        return cls(decode_rows, decode_slots, extends)


@dataclass(frozen=True)
class RecurrentPlan:
    """What one step runs in layers with recurrent state: `calls` in order, each continuing from the state that the previous one left."""

    num_tokens: int
    calls: tuple[StateRows, ...]
