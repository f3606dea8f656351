"""Pages of rows of unequal length, shared until one of them writes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_attn.hf.shared_pages import Pages, SharedPages
from paged_attn.interrupts import uninterrupted

Lengths = NDArray[np.int64]


class RaggedTable:
    """Rows x pages of one cache. A table that is deleted releases its pages.

    Attributes:
        lengths: [rows] int64, number of tokens in each row.
        pages: [rows, width] int64, each row's pages in order, then zeros.
    """

    def __init__(self, shared: SharedPages, rows: int = 0) -> None:
        self.shared = shared
        self.lengths: Lengths = np.zeros(rows, np.int64)
        self.pages: Pages = np.zeros((rows, 0), np.int64)

    @property
    def num_pages(self) -> Lengths:
        """[rows] int64: the number of pages of each row."""
        return -(-self.lengths // self.shared.page_size)

    @uninterrupted
    def extend(self, new: Lengths) -> None:
        """Makes room for `new` [rows] more tokens in each row, in pages that no other row holds.

        Raises:
            CacheFull: too few pages are free; nothing was changed.
        """
        size, before = self.shared.page_size, self.num_pages
        after = -(-(self.lengths + new) // size)
        rows = ((self.lengths % size > 0) & (new > 0)).nonzero()[0]  # these also write into their last page
        columns = self.lengths[rows] // size
        self.pages[rows, columns], added = self.shared.make_writable(self.pages[rows, columns], int((after - before).sum()))
        width = int(after.max(initial=0))
        if width > self.pages.shape[1]:
            self.pages = np.pad(self.pages, ((0, 0), (0, max(width, 2 * self.pages.shape[1]) - self.pages.shape[1])))
        counts = after - before
        owner = np.arange(len(new)).repeat(counts)
        self.pages[owner, np.arange(len(added)) - (counts.cumsum() - counts - before)[owner]] = added
        self.lengths = self.lengths + new

    @uninterrupted
    def select(self, rows: NDArray[np.int64]) -> None:
        """Row i continues from row `rows[i]`; nothing is copied."""
        pages = self.pages[rows]
        self.shared.hold(pages)
        self.shared.drop(self.pages)
        self.pages, self.lengths = pages, self.lengths[rows]

    @uninterrupted
    def truncate(self, lengths: Lengths) -> None:
        """Forgets each row's tokens from `lengths` [rows] on."""
        self.lengths = np.minimum(self.lengths, lengths)
        gone = np.arange(self.pages.shape[1]) >= self.num_pages[:, None]
        self.shared.drop(self.pages[gone])
        self.pages[gone] = 0

    @uninterrupted
    def clear(self) -> None:
        """Releases all pages and rows."""
        self.shared.drop(self.pages)
        self.lengths, self.pages = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)

    @uninterrupted
    def copied(self) -> RaggedTable:
        """Another table with the same rows on the same pages."""
        other = RaggedTable(self.shared)
        self.shared.hold(self.pages)
        other.lengths, other.pages = self.lengths.copy(), self.pages.copy()
        return other
