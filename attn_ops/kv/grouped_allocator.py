"""Pages of a pool with groups of layers: each page of a request maps to one frame of the pool per group, or to none once it is freed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from paged_attn.attn_ops.kv.page_allocator import PageAllocator


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
        self.give_back(pages, range(self.num_groups))

    def give_back(self, pages: Sequence[int] | NDArray[np.int64], groups: Sequence[int]) -> None:
        """Unmap the frames of these pages, which must be distinct, in these groups."""
        at = np.ix_(np.asarray(groups, np.int64), np.asarray(pages, np.int64))
        frames = self.frames[at]
        self._free_frames += frames[frames > 0][::-1].tolist()
        self.in_use[at[0].ravel()] -= np.count_nonzero(frames, axis=1)
        self.frames[at] = 0

    def fill_up(self, page: int, source: int) -> None:
        """Where a page has no frame, give it that of `source`, which holds the same tokens."""
        lacking = self.frames[:, page] == 0
        self.frames[lacking, page] = self.frames[lacking, source]
        self.frames[lacking, source] = 0
