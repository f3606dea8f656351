"""A KV pool whose pages several rows and caches can share: reference counts, copy on write, growth."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.kv.page_allocator import OutOfPages, PageAllocator
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.interrupts import held_back

Pages = NDArray[np.int64]


class CacheFull(OutOfPages):
    """A `PagedCache` with a fixed number of pages has too few free; nothing was written."""

    def __str__(self) -> str:
        return (
            f"needed {self.needed} more KV pages, but only {self.free} of this PagedCache's are free; give it more num_pages, or none, "
            "so that the pool grows; or use fewer rows or beams, or drop or reset() other caches on the same pool"
        )


class SharedPages:
    """The pages of one pool with the number of holders of each. Page 0 marks "no page" in page tables and is never held.

    Args:
        grows: the pool grows as needed, by copying it into a larger allocation.

    Attributes:
        lock: held while pages are read or changed, since caches of several threads may share the pool.
    """

    def __init__(self, pool: KVPool, grows: bool = False) -> None:
        self.pool, self.page_size, self.grows = pool, pool.page_size, grows
        self._allocator = PageAllocator(pool.num_pages, pool.page_size)
        self._holders = np.zeros(pool.num_pages, np.int64)
        self.lock, self._left = threading.RLock(), deque[Pages]()

    @classmethod
    def of_layers(
        cls, layers: Sequence[AttentionSpec], page_size: int, dtype: torch.dtype, device: torch.device, num_pages: int | None
    ) -> SharedPages:
        """The pages of a new pool; `num_pages` includes page 0; None: the pool grows."""
        with torch.inference_mode(False):  # the pool outlives the mode it is created in
            return cls(KVPool(layers, 2 if num_pages is None else num_pages, page_size, dtype, device), grows=num_pages is None)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedPages:
        return self  # copied caches hold the same pages

    def __getstate__(self) -> dict[str, Any]:
        with held_back, self.lock:
            self._collect()
            return {name: value for name, value in vars(self).items() if name not in ("lock", "_left")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lock, self._left = threading.RLock(), deque[Pages]()

    def drop_later(self, pages: Pages) -> None:
        """`drop`, for finalizers: these run in any thread at any time, even while we change the counts."""
        self._left.append(pages)

    def _collect(self) -> None:
        while self._left:
            self.drop(self._left.popleft())

    @property
    def num_used(self) -> int:
        """Pages in use, each counted once."""
        with held_back, self.lock:
            self._collect()
        return self._allocator.num_usable - self._allocator.num_free

    def take(self, count: int) -> Pages:
        """`count` pages without holders, now held once. Raises CacheFull: too few are free and the pool does not grow; none was taken."""
        self._collect()
        if (missing := count - self._allocator.num_free) > 0:
            if not self.grows:
                raise CacheFull(count, self._allocator.num_free)
            self._grow(missing)
        pages = np.array(self._allocator.allocate(count), np.int64)
        self._holders[pages] = 1
        return pages

    def hold(self, pages: Pages) -> None:
        """Adds one holder to each page in `pages`, once for each time it is listed."""
        np.add.at(self._holders, pages[pages > 0], 1)

    def drop(self, pages: Pages) -> None:
        """Removes one holder from each page, once for each time it is listed; frees pages without holders."""
        pages = pages[pages > 0]
        np.subtract.at(self._holders, pages, 1)
        distinct = np.unique(pages)
        self._allocator.free(distinct[self._holders[distinct] == 0].tolist())

    def make_writable(self, pages: Pages, more: int) -> tuple[Pages, Pages]:
        """(`pages` [n], held by the caller, with shared ones replaced by copies; `more` new pages). Raises CacheFull: as `take`; nothing
        was changed."""
        self._collect()
        surplus = self._surplus(pages)
        fresh = self.take(int(surplus.sum()) + more)
        copies, added = np.split(fresh, [int(surplus.sum())])
        own = pages.copy()
        if len(copies):
            rows = self.pool.storage.view(self.pool.num_pages, -1)
            rows[torch.from_numpy(copies).to(rows.device)] = rows[torch.from_numpy(pages[surplus]).to(rows.device)]
            self.drop(pages[surplus])
            own[surplus] = copies
        return own, added

    def _surplus(self, pages: Pages) -> NDArray[np.bool_]:
        """Which entries of `pages` [n] need a copy before all are written: all except the last one without another holder."""
        left, needs = {int(p): int(self._holders[p]) for p in pages}, np.zeros(len(pages), np.bool_)
        for index, page in enumerate(pages.tolist()):
            needs[index] = left[page] > 1
            left[page] -= int(needs[index])
        return needs

    def _grow(self, missing: int) -> None:
        old, before = self.pool, self._allocator
        number = old.num_pages + max(missing, old.num_pages // 2)
        with torch.inference_mode(False):
            self.pool = KVPool(old.layers, number, self.page_size, old.dtype, old.device)
            self.pool.storage[: old.storage.numel()] = old.storage
        self._allocator = PageAllocator(number, self.page_size)
        self._allocator.free([p for p in self._allocator.allocate(old.num_pages - 1) if not before.is_allocated(p)])
        self._holders = np.concatenate([self._holders, np.zeros(number - old.num_pages, np.int64)])
