"""Hands out the pages of one KV pool.

A page is `page_size` consecutive token slots. The allocator only keeps the books; the memory belongs to the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class OutOfPages(RuntimeError):
    """An allocation asked for more pages than are free; nothing was handed out.

    Args:
        needed: how many pages were asked for.
        free: how many pages were free at that moment.
    """

    def __init__(self, needed: int, free: int) -> None:
        # All of this goes to args, so that the exception survives pickling between processes.
        super().__init__(needed, free)
        self.needed = needed
        self.free = free

    def __str__(self) -> str:
        return (
            f"needed {self.needed} KV pages, but only {self.free} are free; evict cached pages, preempt a request, "
            "or build the pool with more pages"
        )


class PageAllocator:
    """The free list of a pool of `num_pages` pages. Page 0 holds padded rows and is never handed out.

    Every operation on n pages is O(n). Not thread-safe: one scheduler owns it.

    Args:
        num_pages: pages in the pool, including the reserved page 0; at least 2.
        page_size: tokens per page; at least 1.

    Raises:
        ValueError: either number is too small.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}, but must be at least 2: page 0 holds padded rows; enlarge the pool")
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}, but must be at least 1; powers of two such as 16 are usual")
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack whose top is the end: fresh pages are handed out as 1, 2, 3, ..., and the last freed are reused first.
        self._free = list(range(num_pages - 1, 0, -1))
        self._allocated = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that can ever be allocated: all but the reserved page 0."""
        return self.num_pages - 1

    @property
    def num_allocated(self) -> int:
        """Pages that are handed out now."""
        return self.num_pages - 1 - len(self._free)

    def is_allocated(self, page: int) -> bool:
        """Whether `page` is handed out now; False for the reserved page 0.

        Raises:
            ValueError: `page` is not a page of this pool.
        """
        self._check_range(page)
        return bool(self._allocated[page])

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens; the last one may be partly empty.

        Raises:
            ValueError: `num_tokens` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}, but must be 0 or more; pass a count of tokens")
        return -(-num_tokens // self.page_size)

    def allocate(self, n: int) -> list[int]:
        """Takes `n` pages from the free list: all of them or none.

        Raises:
            OutOfPages: fewer than `n` pages are free.
            ValueError: `n` is negative.
        """
        if n < 0:
            raise ValueError(f"asked to allocate {n} pages, but the count must be 0 or more; use free() to return pages")
        if n > self.num_free:
            raise OutOfPages(n, self.num_free)
        split = len(self._free) - n
        pages = self._free[split:][::-1]
        del self._free[split:]
        for page in pages:
            self._allocated[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Returns `pages` to the free list. If one of them is refused, none is freed.

        Raises:
            ValueError: a page is out of range, is the reserved page 0, is not allocated, or is listed twice.
        """
        pages = list(pages)
        seen: set[int] = set()
        for page in pages:
            self._check_range(page)
            if page == 0:
                raise ValueError(
                    "cannot free page 0: it is reserved for padded rows and never handed out; drop the padding from the page list first"
                )
            if page in seen or not self._allocated[page]:
                how = "is listed twice in this call" if page in seen else "is not allocated"
                raise ValueError(f"double free of page {page}: it {how}; each allocated page has one owner, who frees it once")
            seen.add(page)
        for page in pages:
            self._allocated[page] = 0
        self._free.extend(reversed(pages))

    def _check_range(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(
                f"page {page} is out of range: this pool has pages 0 to {self.num_pages - 1}; was it allocated from another pool?"
            )


class GroupedAllocator(PageAllocator):
    """Hands out pages, the ids that requests and the prefix cache hold, each with a frame (a page of the `KVPool`) in every group.

    Once a group no longer needs a page's tokens, `give_back` unmaps the page's frame in that group, for any page and group; the page itself
    stays allocated.
    `num_free` and `num_usable` count pages with all their frames. Page 0 and frame 0 are reserved.

    Args:
        num_frames: pages of the pool, including frame 0.
        page_size: tokens of a page, and of a frame.
        num_groups: frames of a new page.
        num_pages: ids, including page 0; equal to `num_frames` if some group gives nothing back.

    Attributes:
        frames: [num_groups, num_pages] int32, 0 where a page has none; read only.
        in_use: [num_groups], how many frames each group uses; read only.
    """

    def __init__(self, num_frames: int, page_size: int, num_groups: int, num_pages: int | None = None) -> None:
        super().__init__(num_frames if num_pages is None else num_pages, page_size)
        self.num_frames, self.num_groups = num_frames, num_groups
        self.frames = np.zeros((num_groups, self.num_pages), np.int32)
        self.in_use = np.zeros(num_groups, np.int64)
        self._free_frames = list(range(num_frames - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return min(len(self._free), len(self._free_frames) // self.num_groups)

    @property
    def num_usable(self) -> int:
        return min(self.num_pages, (self.num_frames - 1) // self.num_groups + 1) - 1

    @property
    def num_free_ids(self) -> int:
        """Ids of pages that could be handed out if there were frames for them."""
        return len(self._free)

    @property
    def num_free_frames(self) -> int:
        """Frames to which no page is mapped."""
        return len(self._free_frames)

    def allocate(self, n: int) -> list[int]:
        pages = super().allocate(n)
        split = len(self._free_frames) - n * self.num_groups
        if n:
            self.frames[:, pages] = np.array(self._free_frames[split:][::-1], np.int32).reshape(self.num_groups, n)
            del self._free_frames[split:]
            self.in_use += n
        return pages

    def free(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        super().free(pages)
        if pages:
            self.give_back(pages, range(self.num_groups))

    def give_back(self, pages: Sequence[int] | NDArray[np.int64], groups: Sequence[int]) -> None:
        """Unmap the frames of these pages, which must be distinct, in these groups."""
        rows = np.asarray(groups, np.int64)
        at = rows[:, None], np.asarray(pages, np.int64)  # np.ix_ takes as long as all else here
        frames = self.frames[at]
        self._free_frames += frames[frames > 0][::-1].tolist()
        self.in_use[rows] -= np.count_nonzero(frames, axis=1)
        self.frames[at] = 0

    def fill_up(self, page: int, source: int) -> None:
        """Where a page has no frame, give it that of `source`, which holds the same tokens."""
        lacking = self.frames[:, page] == 0
        self.frames[lacking, page] = self.frames[lacking, source]
        self.frames[lacking, source] = 0
