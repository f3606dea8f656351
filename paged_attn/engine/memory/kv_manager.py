"""Pages and state slots of requests: taken from their allocators, shared through the prefix cache, given back whatever happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from paged_attn.attn_ops.batch.requests import StateCheckpoint
from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.attn_ops.kv.radix_cache import Match, RadixCache
from paged_attn.attn_ops.kv.radix_node import RadixNode
from paged_attn.attn_ops.kv.state_pool import SlotAllocator, StatePool
from paged_attn.engine.memory.budget import NO_STATE, StateSlots
from paged_attn.engine.memory.state_snapshots import SnapshotPoints, StateSnapshots
from paged_attn.engine.requests.request import Request
from paged_attn.engine.requests.request_rows import RequestRows


class KVManager:
    """Owns the allocators and the radix tree.

    A request's leading `num_locked` tokens lie in pages of the tree, under its lock; its other pages are its own.

    Args:
        slots, states: of the model's recurrent state, if it has any. Then prefixes are shared only where the cache may keep states.
        snapshot_interval: see `SnapshotPoints`.
        allocator: of pages, if it is another than one of `num_pages`.

    Attributes:
        version: grows when pages are released or shared. Until then who could not be admitted still can not, unless this manager
            `frees_as_it_runs`: what running requests hold becomes free as they go on.
    """

    frees_as_it_runs = False

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_cache: bool,
        slots: StateSlots = NO_STATE,
        states: StatePool | None = None,
        snapshot_interval: int = 0,
        allocator: PageAllocator | None = None,
    ) -> None:
        self.allocator = allocator or PageAllocator(num_pages, page_size)
        self.page_size = page_size
        self.state_slots = SlotAllocator(slots.total) if states else None
        self._states = states
        self._points = SnapshotPoints(page_size, snapshot_interval, slots.kept)
        self.version = 0
        self.snapshots: StateSnapshots | None = None
        self.tree: RadixCache | None = None
        self._leave_no_state: Collection[Request] = ()
        if prefix_cache and states is None:
            self.tree = RadixCache(self.allocator)
        elif prefix_cache and states is not None and self.state_slots is not None and slots.kept:
            self.snapshots = StateSnapshots(self.allocator, self.state_slots, states.copy, slots.kept, slots.reserved)
            self.tree = self.snapshots.tree

    @property
    def num_available(self) -> int:
        """Pages that a request could get now: free ones and those that can be evicted."""
        return self.allocator.num_free + self.cached_pages

    @property
    def cached_pages(self) -> int:
        """Pages that the prefix cache alone holds, those included of which groups of layers have given back their part."""
        return 0 if self.tree is None else self.tree.evictable_pages

    @property
    def held_pages(self) -> int:
        """Pages that requests hold, likewise."""
        return self.allocator.num_allocated - self.cached_pages

    @property
    def num_usable(self) -> int:
        return self.allocator.num_usable

    @property
    def longest(self) -> int:
        """Pages that one request may come to."""
        return self.num_usable

    @property
    def frames(self) -> NDArray[np.int32] | None:
        """[groups, pages] where the layers are in groups: see `GroupedAllocator`."""
        return None

    def use_by_retention(self, frame_bytes: int) -> dict[str, tuple[int, int]]:
        """By what groups of layers keep, in words: pages of the pool that requests and the prefix cache have, and their bytes."""
        return {}

    def shortfall(self, request: Request) -> int:
        """What is lacking for all tokens of a request that has adopted its prefix, in the unit of `gain`; 0 or less: nothing."""
        return self.allocator.pages_for(len(request.tokens)) - request.num_pages - self.num_available

    def gain(self, requests: Sequence[Request]) -> int:
        """What `release` of all of them gives at least: their own pages, and those of the tree that nobody else has locked."""
        locks = Counter[RadixNode]()
        for node in (request.lock for request in requests):
            while node is not None:
                locks[node] += 1
                node = node.parent
        own = sum(request.num_pages - request.num_locked // self.page_size for request in requests)
        return own + sum(len(node.pages) for node, count in locks.items() if node.lock_count == count)

    def can_go_on(self, request: Request) -> bool:
        """Whether a request still has what it needs if its last steps did not happen."""
        return self._states is None or not (request.num_cached or request.snapshots)

    @property
    def num_snapshots(self) -> int:
        """Recurrent states that are kept at the ends of cached prefixes."""
        return 0 if self.snapshots is None else self.snapshots.num_attached

    @property
    def snapshot_bytes(self) -> int:
        """What these take of the memory for states."""
        return 0 if self._states is None else self.num_snapshots * self._states.slot_bytes

    @property
    def slots_in_use(self) -> int:
        """Slots of recurrent state that requests have, and those that they fill for the prefix cache."""
        return 0 if self.state_slots is None else self.state_slots.num_held - self.num_snapshots

    @property
    def can_admit(self) -> bool:
        """Whether one more request could have a state slot: a free one, or that of a kept state which gives way."""
        if self.state_slots is None or self.state_slots.num_free:
            return True
        return self.snapshots is not None and self.snapshots.num_yielding > 0

    def take_state_slot(self, request: Request) -> None:
        """Give a request that is about to run its slot, where the model has recurrent state, filled with that at the end of its prefix;
        `release` takes it back."""
        if self.snapshots is not None:
            request.state_slot = self.snapshots.slot_for_request(request.lock if request.num_cached else None)
        elif self.state_slots is not None:
            request.state_slot = self.state_slots.allocate()

    def adopt_prefix(self, request: Request) -> None:
        """Give a request without pages the longest cached prefix (with recurrent state: that has a snapshot); its last token is always
        left to compute, and so is what logits are wanted of, which the cache does not have."""
        if self.tree is None:
            return
        match = self.tree.match(request.tokens[: request.num_reusable], request.prefix_key)
        fork, match = match.num_tokens, self._usable(match, request)
        if self.snapshots is not None:
            request.tokens_without_state = fork - match.num_tokens
            request.snapshot_points, request.spare_points = self._points.of(len(request.tokens), match.num_tokens, fork)
        self.tree.lock(match.node)
        request.lock = match.node
        request.add_pages(match.pages)
        request.num_cached = request.num_locked = match.num_tokens

    def _usable(self, match: Match, request: Request) -> Match:
        """The longest part of a match that a request can start from."""
        return match if self.snapshots is None else self.snapshots.tree.cut_to_payload(match)

    def cached_tokens(self, request: Request) -> int:
        """What `adopt_prefix` would find, in tokens; changes nothing."""
        if self.tree is None:
            return 0
        return self.tree.num_cached(request.tokens, request.prefix_key, request.num_reusable, with_payload=self.snapshots is not None)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens; False, and nothing changed, if the pages are not to be had."""
        missing = self.allocator.pages_for(num_tokens) - request.num_pages
        if missing > 0:
            if not self._make_room(missing):
                return False
            request.add_pages(self.allocator.allocate(missing))
        return True

    def _make_room(self, num_pages: int) -> bool:
        """Let so many pages be free; False, and nothing changed, if they are not to be had."""
        if num_pages > self.num_available:
            return False
        if self.tree is not None and num_pages > self.allocator.num_free:
            self.tree.evict(num_pages - self.allocator.num_free)
        return True

    def add_page_each(self, rows: RequestRows, indices: NDArray[np.int64]) -> bool:
        """Give each of some rows, all different, its next page; False, and nothing changed, if there are not that many free ones."""
        if len(indices) > self.allocator.num_free:
            return False
        rows.add_page_each(indices, self.allocator.allocate(len(indices)))
        return True

    def take_checkpoints(self, requests: Sequence[Request], counts: Sequence[int]) -> dict[int, list[StateCheckpoint]]:
        """For a step of so many tokens of each request: by index, which states it shall keep on the way, and in which slots. If it was
        launched, `keep_states` comes next; if it fails, nothing, and the next step may have the slots."""
        found = {}
        for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
            if not request.snapshot_points:
                continue
            assert self.snapshots is not None
            start, checkpoints = request.num_cached, []
            for point in request.snapshot_points:
                if point >= start + count:
                    break
                slot = request.taken_slots.get(point) or self.snapshots.take()
                if slot is not None:
                    request.taken_slots[point] = slot
                    checkpoints.append(StateCheckpoint(point - start, slot))
            if checkpoints:
                found[index] = checkpoints
        return found

    def keep_states(self, requests: Sequence[Request]) -> None:
        """After a step was launched: what it kept on the way is the requests', and so is a copy of the state of those that have just come
        to one of their points. Both are shared when a token vouches for them."""
        for request in requests:
            while request.snapshot_points and request.snapshot_points[0] <= request.num_cached:
                assert self.snapshots is not None
                point = request.snapshot_points.pop(0)
                slot = request.taken_slots.pop(point, None)
                if point == request.num_cached and (slot := slot or self.snapshots.take()) is not None:
                    self.snapshots.fill(slot, request.state_slot)
                if slot is not None:
                    request.snapshots[point] = slot

    def share(self, request: Request) -> None:
        """Put the request's full pages, as far as a token vouches for them, into the tree, and the states that it kept; where the tree
        has the same prefix already, its page replaces ours."""
        self._share_pages(request)
        for point in sorted(request.snapshots):  # of states of one age the last one goes last
            assert self.snapshots is not None
            node = self.snapshots.tree.match(request.tokens[:point], request.prefix_key).node
            self.snapshots.attach(node, request.snapshots.pop(point), point in request.spare_points)

    def _share_pages(self, request: Request) -> None:
        if self.tree is None or request.num_validated // self.page_size * self.page_size <= request.num_locked:
            return
        self.version += 1
        locked, first = request.num_locked, request.num_locked // self.page_size
        assert request.lock is not None
        inserted = self.tree.extend(request.lock, request.tokens[locked : request.num_validated], request.pages[first:])
        self.tree.lock(inserted.node)
        self.tree.unlock(request.lock)
        request.lock = inserted.node
        request.num_locked = request.num_validated // self.page_size * self.page_size
        for position, mine, trees in inserted.duplicates:
            request.replace_page(first + position, trees)
            self._free_duplicate(mine, trees)

    def _free_duplicate(self, page: int, kept: int) -> None:
        """Free a request's page that holds what `kept` does."""
        self.allocator.free([page])

    def release(self, request: Request, *, share: bool) -> None:
        """Take all pages from a request; with `share` its vouched full pages stay in the tree for others. Safe to call twice."""
        if request.num_pages or request.state_slot:
            self.version += 1
        if share:
            self._share_pages(request)
            self._share_last_state(request)
        for slot in (*request.snapshots.values(), *request.taken_slots.values()):
            assert self.snapshots is not None
            self.snapshots.drop(slot)
        self.allocator.free(request.pages[request.num_locked // self.page_size :])
        if request.lock is not None:
            assert self.tree is not None
            self.tree.unlock(request.lock)
        if request.state_slot:
            assert self.state_slots is not None
            self.state_slots.free(request.state_slot)
        request.clear_pages()
        request.num_cached, request.num_locked, request.lock, request.state_slot = 0, 0, None, 0
        request.num_validated, request.snapshot_points, request.spare_points = 0, [], set()
        request.snapshots, request.taken_slots = {}, {}

    @contextmanager
    def leaving_no_states(self, requests: Collection[Request]) -> Iterator[None]:
        """Inside, those of these requests that end or are preempted leave no state behind: it may be ahead of their tokens, as a step
        failed that was for them, or another request is to have its slot. May be nested."""
        before, self._leave_no_state = self._leave_no_state, [*self._leave_no_state, *requests]
        try:
            yield
        finally:
            self._leave_no_state = before

    def _share_last_state(self, request: Request) -> None:
        """Leave the state of a request that ends or is preempted in its slot, for others, if its tokens fill their last page: where `lock`
        ends."""
        if self.snapshots is None or request in self._leave_no_state:
            return
        if request.num_validated != request.num_cached or not request.num_cached == request.num_locked > 0:
            return
        if request.lock.payload is None and self.snapshots.take_over(request.state_slot):
            self.snapshots.attach(request.lock, request.state_slot)
            request.state_slot = 0
