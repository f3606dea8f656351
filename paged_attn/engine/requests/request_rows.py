"""The numbers and pages of all requests that every step reads: one row of integers and one row of pages per request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class RequestRows:
    """Columns [rows] int64 and pages [rows, width] int32, zeros past a row's `num_pages`; unused rows are all zeros.

    This is the only copy: `Request` reads and writes its attributes of these names here.
    """

    num_cached: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_prompt: NDArray[np.int64]
    token_limit: NDArray[np.int64]
    num_pages: NDArray[np.int64]
    future_row: NDArray[np.int64]
    produced_by: NDArray[np.int64]
    state_slot: NDArray[np.int64]
    skips_host_work: NDArray[np.int64]
    is_argmax_only: NDArray[np.int64]
    scores_from: NDArray[np.int64]
    adapter: NDArray[np.int64]
    length_border: NDArray[np.int64]

    def __init__(self, rows: int) -> None:
        names = RequestRows.__annotations__  # the columns above
        self._numbers = np.zeros((len(names), rows), np.int64)
        for name, column in zip(names, self._numbers, strict=True):
            setattr(self, name, column)
        self.pages = np.zeros((rows, 0), np.int32)  # reallocated when it grows: keep no views
        self._free = list(range(rows - 1, -1, -1))

    def take(self) -> int:
        """Take a free row."""
        return self._free.pop()

    def take_from(self, other: RequestRows, row: int) -> int:
        """Take a free row, move a row of `other` into it, and free that one."""
        mine = self.take()
        pages = other.pages[row, : other.num_pages[row]].tolist()
        self._numbers[:, mine] = other._numbers[:, row]
        self.num_pages[mine] = 0
        self.add_pages(mine, pages)
        other.clear_pages(row)
        other._numbers[:, row] = 0
        other._free.append(row)
        return mine

    def add_pages(self, row: int, pages: Sequence[int]) -> None:
        """Append to a row's pages."""
        start = self.num_pages.item(row)
        self._widen(start + len(pages))
        self.pages[row, start : start + len(pages)] = pages
        self.num_pages[row] = start + len(pages)

    def add_page_each(self, rows: NDArray[np.int64], pages: Sequence[int]) -> None:
        """Append one page to each of these distinct rows."""
        ends = self.num_pages[rows]
        self._widen(ends.max(initial=0) + 1)
        self.pages[rows, ends] = pages
        self.num_pages[rows] = ends + 1

    def _widen(self, width: int) -> None:
        if (old := self.pages.shape[1]) < width:
            wider = np.zeros((len(self.pages), max(width, 2 * old)), np.int32)
            wider[:, :old] = self.pages
            self.pages = wider

    def clear_pages(self, row: int) -> None:
        self.pages[row, : self.num_pages[row]] = 0
        self.num_pages[row] = 0
