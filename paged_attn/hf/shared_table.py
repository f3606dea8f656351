"""The page table of one `PagedCache`: rows of equal length whose pages are shared until one of them writes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.hf.shared_pages import Pages, SharedPages
from paged_attn.interrupts import uninterrupted

Method = TypeVar("Method", bound=Callable[..., Any])
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _locked(method: Method) -> Method:
    """Runs one such method at a time of all tables on a pool."""

    @functools.wraps(method)
    def locked(table: SharedTable, *args: Any) -> Any:
        with table.pages.lock:
            return method(table, *args)

    return cast(Method, locked)


class SharedTable:
    """Rows x pages; all layers read and write through it. A deep copy holds the same pages; a table that is deleted releases its own.

    Attributes:
        pages: the pool, possibly shared with other tables.
        window: the largest window of the layers, or None if one of them sees everything; pages behind it are released.
        recording: keep pages behind the window until the next `truncate`.
        kept_from: the first token that is still stored.
    """

    def __init__(self, pages: SharedPages, window: int | None) -> None:
        self.pages, self.window, self.recording = pages, window, False
        self.kept_from = 0
        self._table: Pages = np.zeros((0, 0), np.int64)
        self._writable = (0, 0)  # tokens whose pages exist and have no other holder
        self._unshared = False  # several pages were written at once, and rows may have equal ones
        self._on_device: Tensor | None = None
        self._indices: dict[tuple[str, int, int], Any] = {}  # for the current step, shared by all layers

    def __del__(self) -> None:
        self.pages.drop_later(self._table)

    @uninterrupted
    @_locked
    def __deepcopy__(self, memo: dict[int, Any]) -> SharedTable:
        other = SharedTable(self.pages, self.window)
        other.recording, other.kept_from = self.recording, self.kept_from
        other._replace(self._table.copy())
        self._changed()
        memo[id(self)] = other
        return other

    @property
    def rows(self) -> int:
        """Number of rows; 0 before the first token."""
        return len(self._table)

    @property
    def held(self) -> Pages:
        """The distinct pages of all rows."""
        return np.unique(self._table[self._table > 0])

    def row_pages(self) -> list[Pages]:
        """Each row's pages in order."""
        return list(self._table)

    @_locked
    def prepare(self, rows: int, start: int, end: int) -> None:
        """Makes tokens `start` to `end - 1` of all rows writable: takes new pages, and copies those that others hold too. Raises CacheFull:
        the pool has too few pages; nothing was changed; UnsupportedError: the table has another number of rows."""
        if rows == self.rows and self._writable[0] <= start and end <= self._writable[1]:
            return
        self._prepare(rows, start, end)

    @uninterrupted
    def _prepare(self, rows: int, start: int, end: int) -> None:
        """`prepare` without its early return, which most layers take."""
        self._indices = {}
        if self.rows and rows != self.rows:
            raise UnsupportedError(
                f"this PagedCache holds {self.rows} rows, but K and V of {rows} rows came; use a new one or reset() for another batch, or "
                "batch_repeat_interleave() and batch_select_indices() to change its rows"
            )
        if self._unshared and rows == self.rows:
            self._share_equal_pages(start // self.pages.page_size)
        if self.window is not None and not self.recording:
            self._let_go_before(start - self.window + 1)
        size = self.pages.page_size
        table = self._table if self.rows else np.zeros((rows, 0), np.int64)
        first, old, new = start // size, table.shape[1], -(-end // size)
        columns = table[:, first:]
        written = columns[columns > 0]
        own, added = self.pages.make_writable(written, rows * max(new - old, 0))
        if len(added) or not np.array_equal(own, written):
            columns[columns > 0] = own
            self._table = np.concatenate([table, added.reshape(rows, -1)], 1)
            self._changed()
        self._writable, self._unshared = (start, end), rows > 1 and end - start >= size

    @_locked
    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Stores K [rows, heads, n, dim] and V of the tokens from `start` on, which must be writable."""
        size = self.pages.page_size

        def indices() -> tuple[Tensor, Tensor]:
            tokens = torch.arange(start, start + keys.shape[2], device=self.pages.pool.device)
            return self._device_table()[:, tokens // size], tokens % size

        where = self._remember(("write", start, start + keys.shape[2]), indices)
        self.pages.pool.key(layer)[where] = keys.transpose(1, 2)
        self.pages.pool.value(layer)[where] = values.transpose(1, 2)

    @_locked
    def gather(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """K [rows, heads, end - start, dim] and V of tokens `start` to `end - 1`; contiguous, since some models take views of them."""
        size, pool = self.pages.page_size, self.pages.pool
        columns = slice(start // size, -(-end // size))
        pages = self._remember(("read", start, end), lambda: self._device_table()[:, columns].flatten())
        part = slice(start - columns.start * size, end - columns.start * size)
        # index_select copies whole pages; indexing with several tensors takes three times as long on a CPU
        key, value = (of(layer).index_select(0, pages) for of in (pool.key, pool.value))
        key, value = (t.view(self.rows, -1, *t.shape[2:])[:, part].transpose(1, 2).contiguous() for t in (key, value))
        return key, value

    @uninterrupted
    @_locked
    def select(self, rows: Pages) -> None:
        """Row i continues from row `rows[i]`; nothing is copied."""
        self._replace(self._table[rows])

    @uninterrupted
    @_locked
    def truncate(self, length: int) -> None:
        """Forgets tokens from `length` on."""
        columns = -(-length // self.pages.page_size)
        self._replace(self._table[:, :columns] if length else self._table[:0, :0])
        if self.window is not None:
            self._let_go_before(length - self.window + 1)

    @uninterrupted
    @_locked
    def clear(self) -> None:
        """Releases all pages."""
        self._replace(self._table[:0, :0])

    def _replace(self, table: Pages) -> None:
        self.pages.hold(table)
        self.pages.drop(self._table)
        self._table = table
        if not table.size:
            self.kept_from = 0
        self._changed()

    def _share_equal_pages(self, columns: int) -> None:
        """Makes rows with the same prompt share its full pages: those that equal the previous row's bit for bit in every layer."""
        pool, table, self._unshared = self.pages.pool, self._table.copy(), False
        bits = pool.storage.view(_BITS[pool.storage.element_size()]).view(pool.num_pages, -1)
        alike = np.arange(1, self.rows)  # rows that so far equal the previous row
        for column in range(columns):
            mine, before = self._table[alike, column], self._table[alike - 1, column]
            if (apart := np.flatnonzero(mine != before)).size:
                one, other = (bits[torch.from_numpy(p[apart]).to(pool.device)] for p in (mine, before))
                alike = np.delete(alike, apart[~(one == other).all(1).cpu().numpy()])
            for row in alike:
                table[row, column] = table[row - 1, column]
            if not alike.size:
                break
        self._replace(table)

    def _let_go_before(self, token: int) -> None:
        columns = min(token // self.pages.page_size, self._table.shape[1])
        if columns > 0 and columns * self.pages.page_size > self.kept_from:
            self.pages.drop(self._table[:, :columns])
            self._table[:, :columns] = 0
            self.kept_from = columns * self.pages.page_size
            self._changed()

    def _changed(self) -> None:
        self._writable, self._on_device, self._indices = (0, 0), None, {}

    def _device_table(self) -> Tensor:
        if self._on_device is None:
            self._on_device = torch.from_numpy(self._table.copy()).to(self.pages.pool.device)
        return self._on_device

    def _remember(self, what: tuple[str, int, int], make: Callable[[], Any]) -> Any:
        if what not in self._indices:
            self._indices[what] = make()
        return self._indices[what]
