"""Steps of fixed size at fixed addresses: the sizes a captured graph was made for, and the device memory it keeps reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import IntBuffer, PackedInts, words

MIN_ROWS = 2  # torch specializes sizes 0 and 1, so a smaller step is padded to two rows


class StepShape(NamedTuple):
    """What a step is padded to.

    Attributes:
        rows: T, including padding; at least MIN_ROWS and the step's tokens.
        logits: N, including padding; at least MIN_ROWS and the number of logits wanted.
        requests: only for decode steps: pad with dummy requests to this many. Rows and logits are then the same number, which may be 1 if
            the graph that runs was captured for more and is also valid for one.
    """

    rows: int
    logits: int
    requests: int | None = None

    @classmethod
    def smallest(cls, num_tokens: int, num_logits: int) -> StepShape:
        return cls(max(MIN_ROWS, num_tokens), max(MIN_ROWS, num_logits))

    def check(self, num_tokens: int, num_logits: int, num_requests: int) -> None:
        """Raises ValueError if the shape contradicts itself or is too small for the step."""
        if self.requests is not None and not self.rows == self.logits == self.requests:
            raise ValueError(f"a step that is padded with dummy requests has as many rows and logits as requests; got {self}")
        least = MIN_ROWS if self.requests is None else 1
        for what, got, needed in (
            ("requests", num_requests if self.requests is None else self.requests, num_requests),
            ("rows", self.rows, max(least, num_tokens)),
            ("logits", self.logits, max(least, num_logits)),
        ):
            if got < needed:
                raise ValueError(f"the step needs {needed} {what} at least; got {self}: take a larger shape or fewer requests")


class StepFields(NamedTuple):
    """The integers of a step by name, as arrays on the host or as tensors: int64 rows [T], `logits_rows` [N] and slots [T] of each group;
    the others int32, by request. `page_tables` come last because their width varies.
    """

    input_ids: Any
    positions: Any
    logits_rows: Any
    slots: list[Any]
    seq_lens: Any
    query_lens: Any
    query_start: Any
    state_slots: Any
    request_lens: Any
    page_tables: list[Any]

    @classmethod
    def of(cls, fields: Sequence[Any], num_groups: int, num_requests: int, num_pages: int) -> StepFields:
        """Of the fields of a `PackedInts` with the sizes of `sizes`."""
        ids, positions, logits_rows, *rest = fields
        slots, lengths, tables = rest[:num_groups], rest[num_groups:-num_groups], rest[-num_groups:]
        return cls._make([ids, positions, logits_rows, slots, *lengths, [table.reshape(num_requests, num_pages) for table in tables]])

    @staticmethod
    def sizes(rows: int, logits: int, num_requests: int, num_pages: int, num_groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the int64 fields, and of the int32 fields."""
        lengths = (num_requests, num_requests, num_requests + 1, num_requests, num_requests)
        wide = (rows, rows, logits, *(rows,) * num_groups)
        return wide, (*lengths, *(num_requests * num_pages,) * num_groups)


class TableCopy(NamedTuple):
    """Page tables [groups, R, width] int32 in a step's memory, and the tables [groups, max_requests, max_pages] that get their columns.

    Attributes:
        start, distance: of the first group's, and from one group's to the next, in int32.
    """

    start: int
    distance: int
    num_requests: int
    num_pages: int
    into: Tensor


class StepFetch(Protocol):
    """Brings a step to the device in one launch, in place of copies, with the tokens that only the device knows."""

    def __call__(self, memory: Tensor, into: Tensor, num_ids: int, tables: TableCopy | None) -> None:
        """Write a step's fields to `into`, and its page tables where they belong, without waiting.

        Args:
            memory: [words] int64 on the host, pinned if the device is a GPU; nobody writes it again.
            into: [words] int64 on the device. The first `num_ids` are token ids, whose placeholders (below 0) are replaced.
            tables: which page tables go elsewhere; they are the end of `memory`.
        """


class StepBuffers:
    """Device memory for steps, at addresses that captured graphs keep. Each step overwrites the one before.

    Use it only on the stream that runs the graphs: nothing else orders the copies after the work that reads them.
    A field's place depends only on the step's shape; the page tables of a step with dummies are rows of `page_tables`.

    Attributes:
        page_tables: for each group of layers [max_requests, max_pages] int32. Columns past those of a step hold pages of earlier steps.
        fetch: brings steps to the device, with their tokens; None: they are copied, placeholders and all.
        nbytes: of device memory, all together.

    Args:
        max_rows, max_logits: the largest `StepShape.rows` and `.logits`.
        max_requests: per step, including dummies.
        max_pages: per request.
        num_groups: groups of layers with their own page tables.

    Raises:
        ValueError: a size is below 1, or rows or logits are below MIN_ROWS.
    """

    def __init__(
        self, max_rows: int, max_logits: int, max_requests: int, max_pages: int, device: torch.device | str, num_groups: int = 1,
        fetch: StepFetch | None = None,
    ) -> None:  # fmt: skip
        sizes = {"max_rows": max_rows, "max_logits": max_logits, "max_requests": max_requests, "max_pages": max_pages}
        for name, lowest in zip(sizes, (MIN_ROWS, MIN_ROWS, 1, 1), strict=True):
            if sizes[name] < lowest:
                raise ValueError(f"step buffers need {name} of {lowest} at least; got {sizes[name]}")
        self.max_rows, self.max_logits, self.max_requests, self.max_pages = sizes.values()
        self._room, self.num_groups, self.fetch = max_requests + 1, num_groups, fetch
        size = words(*StepFields.sizes(max_rows, max_logits, max_requests, max_pages, num_groups), room=self._room)
        self._ints = IntBuffer(size, device)
        with torch.inference_mode(False):  # see IntBuffer
            self._tables = torch.zeros(num_groups, max_requests, max_pages, dtype=torch.int32, device=device)
            self.page_tables = list(self._tables)
        self._corners = [_corners(table) for table in self.page_tables]

    @property
    def nbytes(self) -> int:
        return self._ints.ints.nbytes + self._tables.nbytes

    def pack(self, shape: StepShape, num_requests: int, num_pages: int) -> PackedInts:
        """Host memory for a step with a page table [num_requests, num_pages], to be copied to these buffers.

        Raises:
            ValueError: the step does not fit.
        """
        for what, got, allowed in (
            ("rows", shape.rows, self.max_rows),
            ("logits", shape.logits, self.max_logits),
            ("requests", num_requests, self.max_requests),
            ("pages", num_pages, self.max_pages),
        ):
            if got > allowed:
                per = " for a request" if what == "pages" else ""
                raise ValueError(
                    f"the step has {got} {what}{per}, but its buffers were made for max_{what}={allowed}; "
                    "make larger StepBuffers, or run this step without them"
                )
        sizes = StepFields.sizes(shape.rows, shape.logits, num_requests, num_pages, self.num_groups)
        return PackedInts(*sizes, into=self._ints, room=self._room)

    def send(self, packed: PackedInts, shape: StepShape, num_requests: int, num_pages: int) -> StepFields:
        """Bring what `pack` gave, now filled, to the device without waiting; returns its fields there. With `shape.requests` its page
        tables are the first rows of `page_tables`, and their first columns are written."""
        sizes, decodes = (self.num_groups, num_requests, num_pages), shape.requests is not None
        corners = [corner(num_requests, num_pages) for corner in self._corners] if decodes else []
        if self.fetch is None:
            placed = StepFields.of(packed.to_device(), *sizes)
            for (_, corner), table in zip(corners, placed.page_tables, strict=False):
                corner.copy_(table)
        else:
            into, fields = packed.destination()
            placed, tables = StepFields.of(fields, *sizes), None
            if decodes:
                start = packed.start_of(-self.num_groups)
                distance = packed.start_of(-1) - start
                tables = TableCopy(start, distance // max(self.num_groups - 1, 1), num_requests, num_pages, self._tables)
            self.fetch(packed.memory, into, shape.rows, tables)
        return placed._replace(page_tables=[rows for rows, _ in corners]) if decodes else placed


def _corners(table: Tensor) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """A function that returns a table's first rows, and the first columns of those, as cached views (see `IntBuffer`)."""

    @lru_cache(maxsize=IntBuffer.KEPT)
    def corner(num_rows: int, width: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            rows = table[:num_rows]
            return rows, rows[:, :width]

    return corner
