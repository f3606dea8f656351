"""Pages of models with windows: frames behind a layer's window are freed when memory is needed.

Nothing is freed before that, so the prefix cache can use these frames as long as there is room.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_attn.attn_ops.kv.layer_groups import LayerGroup, Retention
from paged_attn.attn_ops.kv.page_allocator import GroupedAllocator
from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.memory.budget import NO_STATE, StateSlots, frames_of_request
from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.memory.radix_cache import Match
from paged_attn.engine.memory.radix_node import RadixNode
from paged_attn.engine.requests.request import Request
from paged_attn.engine.requests.request_rows import RequestRows

IDS_PER_FRAME = 8  # for models in which every layer frees frames: a page may have no frame left
SLACK = 32  # at least 1/32 of the pages is freed at a time, so that the next steps need not search again
MAX_UNCONFIRMED = 2  # tokens by which `num_cached` may be ahead of what the host knows


def num_page_ids(groups: Sequence[LayerGroup], num_frames: int) -> int:
    """Number of page ids for a pool of `num_frames` frames, each including the reserved one."""
    return num_frames if any(group.keeps.keeps_all for group in groups) else IDS_PER_FRAME * num_frames


@dataclass(frozen=True)
class Kind:
    """Groups that keep the same part of a request: their indices."""

    keeps: Retention
    groups: tuple[int, ...]


class GroupedKVManager(KVManager):
    """A KVManager whose pages have a frame in each group of layers.

    A frame of a window group is needed while its tokens may be seen by the next query of a running request, or of a request that starts
    at a likely point. Likely points are the end of a node of the tree, and where a running request left the tree. When pages run out,
    these are freed, in this order (`_make_room`):

    1. all frames of window groups that are not needed;
    2. cached prefixes, the least recently used first;
    3. frames that are needed only at likely points.

    A prefix match ends where every group still has what the next query sees.

    Args:
        num_frames: pages of the pool, including the reserved one.
        step_tokens: the most tokens of a step.
    """

    frees_as_it_runs = True
    allocator: GroupedAllocator

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_frames: int,
        page_size: int,
        prefix_cache: bool,
        step_tokens: int,
        slots: StateSlots = NO_STATE,
        state_pool: StatePool | None = None,
        snapshot_interval: int = 0,
    ) -> None:
        allocator = GroupedAllocator(num_frames, page_size, len(groups), num_page_ids(groups, num_frames))
        super().__init__(num_frames, page_size, prefix_cache, slots, state_pool, snapshot_interval, allocator)
        self.groups, self.step_tokens = tuple(groups), step_tokens
        by_retention: dict[Retention, list[int]] = {}
        for index, group in enumerate(groups):
            by_retention.setdefault(group.keeps, []).append(index)
        self._kinds = [Kind(keeps, tuple(indices)) for keeps, indices in by_retention.items() if not keeps.keeps_all]
        self._num_full = len(groups) - sum(len(kind.groups) for kind in self._kinds)
        self._left_tree: dict[Request, int] = {}  # per request with pages: the token count at which it left the tree

    @property
    def frames(self) -> NDArray[np.int32]:
        return self.allocator.frames

    @property
    def num_available(self) -> int:
        """A lower bound: frames that `free_unneeded` would find are not counted."""
        return min(super().num_available, self.num_usable)

    @property
    def max_request_pages(self) -> int:
        low, high = 0, self.allocator.num_pages - 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = frames_of_request(self.groups, middle * self.page_size, self.page_size, self.step_tokens) < self.allocator.num_frames
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def use_by_retention(self, frame_bytes: int) -> dict[str, tuple[int, int]]:
        pages: dict[str, int] = {}
        for group, count in zip(self.groups, self.allocator.in_use.tolist(), strict=True):
            pages[group.keeps.describe()] = pages.get(group.keeps.describe(), 0) + count
        return {keeps: (count, count * frame_bytes) for keeps, count in pages.items()}

    def adopt_prefix(self, request: Request) -> None:
        self._left_tree[request] = 0
        super().adopt_prefix(request)

    def _usable(self, match: Match, request: Request) -> Match:
        self._left_tree[request] = match.num_tokens
        assert self.tree is not None
        while True:
            match = super()._usable(match, request)
            if not match.pages:
                return match
            longest = int(self._can_start_after(match.pages).nonzero()[0][-1])
            if longest == len(match.pages):
                return match
            match = self.tree.match(request.tokens[: longest * self.page_size], request.prefix_key)

    def cached_tokens(self, request: Request) -> int:
        if self.tree is None:
            return 0
        pages, with_state = self.tree.peek(request.tokens, request.prefix_key, request.num_reusable)
        can_start = self._can_start_after(pages)
        ends = can_start.nonzero()[0].tolist() if self.states.snapshots is None else [end for end in with_state if can_start[end]]
        return max(ends, default=0) * self.page_size

    def _can_start_after(self, pages: Sequence[int]) -> NDArray[np.bool_]:
        """[len(pages) + 1], for each number of leading pages, whether every group has what a query after them sees."""
        count = np.arange(len(pages) + 1)
        can_start = np.ones(len(pages) + 1, np.bool_)
        for kind in self._kinds:
            lacks = self.frames[kind.groups[0], np.array(pages, np.int64)] == 0
            last_lacking = np.maximum.accumulate(np.append(-1, np.where(lacks, count[:-1], -1)))
            can_start &= last_lacking < kind.keeps.first(count * self.page_size) // self.page_size
        return can_start

    def can_go_on(self, request: Request) -> bool:
        pages = np.array(request.pages, np.int64)  # including pages that a step which was rolled back should have filled
        for kind in self._kinds:
            needed = pages[kind.keeps.first(request.num_cached) // self.page_size :]
            if not self.frames[kind.groups[0], needed].all():
                return False
        return super().can_go_on(request)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        self._left_tree.setdefault(request, 0)
        return super().reserve(request, num_tokens)

    def add_page_each(self, rows: RequestRows, indices: NDArray[np.int64]) -> bool:
        return self._make_room(len(indices)) and super().add_page_each(rows, indices)

    def release(self, request: Request, *, share: bool) -> None:
        super().release(request, share=share)
        self._left_tree.pop(request, None)

    def _free_duplicate(self, page: int, kept: int) -> None:
        self.allocator.fill_up(kept, page)
        super()._free_duplicate(page, kept)

    def shortfall(self, request: Request) -> int:
        """In frames."""
        tokens, had = len(request.tokens), request.num_pages
        more = self.allocator.pages_for(tokens) - had
        wanted = []
        for keeps in (group.keeps for group in self.groups):
            kept = had - keeps.first(request.num_cached) // self.page_size  # prefix pages still kept; at first they add to the new ones
            wanted.append(min(keeps.pages(tokens, self.page_size, self.step_tokens) - kept, more))
        ids = self.allocator.num_free_ids + self.cached_pages
        if more <= ids and sum(wanted) <= self.allocator.num_free_frames:
            return 0
        return max(sum(wanted) - self._obtainable_frames(), (more - ids) * len(self.groups))

    def freed_by(self, requests: Sequence[Request]) -> int:
        return super().freed_by(requests) * self._num_full + self._frames_in_windows() - self._frames_in_windows(without=requests)

    def _obtainable_frames(self) -> int:
        """Free frames, and all frames that running requests do not need."""
        return self.allocator.num_frames - 1 - self.held_pages * self._num_full - self._frames_in_windows()

    def _frames_in_windows(self, without: Collection[Request] = ()) -> int:
        """Frames that running requests need in window groups."""
        count = 0
        for kind in self._kinds:
            needed = self._needed(kind, to_start=False, without=without)
            count += len(kind.groups) * int(np.count_nonzero(self.frames[kind.groups[0], needed]))
        return count

    def _make_room(self, num_pages: int) -> bool:
        allocator = self.allocator
        if num_pages <= allocator.num_free:
            return True
        if num_pages > allocator.num_free_ids + self.cached_pages or num_pages * len(self.groups) > self._obtainable_frames():
            return False
        self.free_unneeded()
        wanted = max(num_pages, allocator.num_usable // SLACK)
        while self.tree is not None and allocator.num_free < wanted and self.tree.evictable_pages:
            self.tree.evict(wanted - allocator.num_free)
        if num_pages > allocator.num_free:
            self.free_unneeded(to_start=False)
        return True

    def free_unneeded(self, *, to_start: bool = True) -> None:
        """Free every frame that no running request needs; with `to_start`, keep those needed at likely starts."""
        for kind in self._kinds:
            self.allocator.give_back(np.flatnonzero((self.frames[kind.groups[0]] > 0) & ~self._needed(kind, to_start)), kind.groups)

    def _needed(self, kind: Kind, to_start: bool, without: Collection[Request] = ()) -> NDArray[np.bool_]:
        """[page ids], whether a later query of a running request sees the page.

        Args:
            to_start: or a query of a request that starts at a likely point.
            without: requests to ignore.
        """
        size, first = self.page_size, kind.keeps.first
        needed = np.zeros(self.allocator.num_pages, np.bool_)
        for request, left_tree in self._left_tree.items():
            if request in without:
                continue
            pages, cached = request.rows.pages[request.row, : request.num_pages], request.num_cached
            needed[pages[first(cached) // size :]] = True
            if to_start:  # where it would continue if it ended now, and where others may diverge from it
                last = max(cached - MAX_UNCONFIRMED, 0) // size * size
                for point in {last, left_tree} if request.num_validated < left_tree else {last}:
                    needed[pages[first(point) // size : point // size]] = True
        if to_start and self.tree is not None:
            for node, end in self.tree.nodes():
                _mark(needed, node, end - first(end * size) // size)
        return needed


def _mark(needed: NDArray[np.bool_], node: RadixNode, count: int) -> None:
    """Mark the last `count` pages of the prefix that ends at a node."""
    above: RadixNode | None = node
    while above is not None and count > 0:
        needed[above.pages[-count:]] = True
        count -= len(above.pages)
        above = above.parent


def make_kv_manager(
    config: EngineConfig, groups: Sequence[LayerGroup], num_pages: int, slots: StateSlots, state_pool: StatePool | None, interval: int
) -> KVManager:
    """The KVManager of a pool with these groups and pages; the rest as in `KVManager`."""
    if not groups:
        return KVManager(num_pages, config.page_size, config.prefix_cache, slots, state_pool, interval)
    return GroupedKVManager(groups, num_pages, config.page_size, config.prefix_cache, config.step_tokens, slots, state_pool, interval)
