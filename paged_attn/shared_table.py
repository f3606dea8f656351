"""The page table of one `PagedCache`: rows of equal length whose pages are shared until one of them writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.shared_pages import Pages, SharedPages


class SharedTable:
    """Rows x pages; all layers read and write through it. A deep copy holds the same pages; a table that is dropped lets go of its own.

    Attributes:
        pages: the pool, maybe shared with other tables.
        window: the largest window of the layers, or None if one of them sees everything: what lies behind it is let go.
        recording: keep what lies behind the window until the next `truncate`.
        kept_from: the first token that is still there.
    """

    def __init__(self, pages: SharedPages, window: int | None) -> None:
        self.pages, self.window, self.recording = pages, window, False
        self.kept_from = 0
        self._table: Pages = np.zeros((0, 0), np.int64)
        self._writable = (0, 0)  # tokens whose pages exist and have no other holder
        self._on_device: Tensor | None = None
        self._slots: tuple[int, Tensor, Tensor] | None = None

    def __del__(self) -> None:
        self.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedTable:
        other = SharedTable(self.pages, self.window)
        other.recording, other.kept_from = self.recording, self.kept_from
        other._replace(self._table.copy())
        self._changed()
        memo[id(self)] = other
        return other

    @property
    def rows(self) -> int:
        """How many there are; 0 before the first token."""
        return len(self._table)

    @property
    def held(self) -> Pages:
        """The distinct pages of all rows."""
        return np.unique(self._table[self._table > 0])

    def row_pages(self) -> list[Pages]:
        """Each row's pages in order."""
        return list(self._table)

    def prepare(self, rows: int, start: int, end: int) -> None:
        """Makes tokens `start` to `end - 1` of all rows writable: new pages, and own copies of those that others hold, too.

        Raises:
            CacheFull: the pool has too few pages; nothing has changed.
            UnsupportedError: the table has another number of rows.
        """
        if rows == self.rows and self._writable[0] <= start and end <= self._writable[1]:
            return
        if self.rows and rows != self.rows:
            raise UnsupportedError(
                f"this PagedCache holds {self.rows} rows, but K and V of {rows} rows came; use a new one or reset() for another batch, or "
                "batch_repeat_interleave() and batch_select_indices() to change its rows"
            )
        if self.window is not None and not self.recording:
            self._let_go_before(start - self.window + 1)
        size = self.pages.page_size
        table = self._table if self.rows else np.zeros((rows, 0), np.int64)
        first, old, new = start // size, table.shape[1], -(-end // size)
        columns = table[:, first:]
        written = columns[columns > 0]
        surplus = self.pages.surplus(written)
        fresh = self.pages.take(int(surplus.sum()) + rows * max(new - old, 0))
        copies, added = np.split(fresh, [int(surplus.sum())])
        if len(copies):
            self.pages.copy(written[surplus], copies)
            self.pages.drop(written[surplus])
            written[surplus] = copies
            columns[columns > 0] = written
        self._table = np.concatenate([table, added.reshape(rows, -1)], 1)
        self._changed()
        self._writable = (start, end)

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Stores K [rows, heads, n, dim] and V of tokens `start`, ...; they must be writable."""
        if self._slots is None or self._slots[0] != start or self._slots[2].shape[0] != keys.shape[2]:
            positions = torch.arange(start, start + keys.shape[2], device=self.pages.pool.device)
            self._slots = (start, self._device_table()[:, positions // self.pages.page_size], positions % self.pages.page_size)
        _, page, offset = self._slots
        self.pages.pool.key(layer)[page, offset] = keys.transpose(1, 2)
        self.pages.pool.value(layer)[page, offset] = values.transpose(1, 2)

    def gather(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """K [rows, heads, end - start, dim] and V of tokens `start` to `end - 1`, as a view whose tokens lie outside its heads."""
        size = self.pages.page_size
        first, pages = start // size, self._device_table()[:, start // size : -(-end // size)]
        part = slice(start - first * size, end - first * size)
        key, value = (of(layer)[pages].flatten(1, 2)[:, part].transpose(1, 2) for of in (self.pages.pool.key, self.pages.pool.value))
        return key, value

    def select(self, rows: Pages) -> None:
        """Row i becomes what row `rows[i]` was: pages gain and lose holders, and nothing is copied."""
        self._replace(self._table[rows])

    def truncate(self, length: int) -> None:
        """Forgets tokens at and past `length`."""
        columns = -(-length // self.pages.page_size)
        self._replace(self._table[:, :columns] if length else self._table[:0, :0])
        if self.window is not None:
            self._let_go_before(length - self.window + 1)

    def clear(self) -> None:
        """Lets go of all pages."""
        self._replace(self._table[:0, :0])

    def _replace(self, table: Pages) -> None:
        self.pages.hold(table)
        self.pages.drop(self._table)
        self._table = table
        if not table.size:
            self.kept_from = 0
        self._changed()

    def _let_go_before(self, token: int) -> None:
        columns = min(token // self.pages.page_size, self._table.shape[1])
        if columns > 0 and columns * self.pages.page_size > self.kept_from:
            self.pages.drop(self._table[:, :columns])
            self._table[:, :columns] = 0
            self.kept_from = columns * self.pages.page_size
            self._changed()

    def _changed(self) -> None:
        self._writable, self._on_device, self._slots = (0, 0), None, None

    def _device_table(self) -> Tensor:
        if self._on_device is None:
            self._on_device = torch.from_numpy(self._table.copy()).to(self.pages.pool.device)
        return self._on_device
