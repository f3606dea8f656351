"""Recurrent states of requests: a slot while they run, and checkpoints that become snapshots in the prefix cache."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from paged_attn.attn_ops.batch.requests import StateCheckpoint
from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.attn_ops.kv.state_pool import SlotAllocator, StatePool
from paged_attn.engine.memory.budget import StateSlots
from paged_attn.engine.memory.radix_cache import Match
from paged_attn.engine.memory.state_snapshots import SnapshotPoints, StateSnapshots
from paged_attn.engine.requests.request import Request


class RequestStates:
    """Owns the slots of a `StatePool`. For a model without recurrent layers all methods do nothing.

    The order of calls: `plan_snapshots` and `take_slot` at admission; `take_checkpoints` before a step and `keep` after its launch; `share`
    once a token has validated the step; `share_last` and `free` when the request ends or is preempted.

    Args:
        pool: None for a model without recurrent layers.
        pages: the allocator of the prefix cache whose nodes carry snapshots.
        prefix_cache: whether there is one; it carries snapshots if `slots` has some to keep.
        interval: see `SnapshotPoints`.

    Attributes:
        allocator: of slots; None without a pool.
        snapshots: None if no states are kept.
    """

    def __init__(self, pool: StatePool | None, slots: StateSlots, pages: PageAllocator, prefix_cache: bool, interval: int) -> None:
        self.pool = pool
        self.allocator = SlotAllocator(slots.total) if pool else None
        self.snapshots: StateSnapshots | None = None
        if prefix_cache and pool is not None and self.allocator is not None and slots.kept:
            self.snapshots = StateSnapshots(pages, self.allocator, pool.copy, slots.kept, slots.reserved)
        self._points = SnapshotPoints(pages.page_size, interval, slots.kept)
        self._share_no_last: Collection[Request] = ()

    @property
    def num_snapshots(self) -> int:
        """How many cached prefixes have a snapshot."""
        return 0 if self.snapshots is None else self.snapshots.num_attached

    @property
    def snapshot_bytes(self) -> int:
        """Memory that snapshots take."""
        return 0 if self.pool is None else self.num_snapshots * self.pool.slot_bytes

    @property
    def num_in_use(self) -> int:
        """Slots that requests hold, including those that they fill for the prefix cache."""
        return 0 if self.allocator is None else self.allocator.num_held - self.num_snapshots

    @property
    def can_admit(self) -> bool:
        """Whether there is a slot for one more request: a free one, or one of a snapshot that may be evicted."""
        if self.allocator is None or self.allocator.num_free:
            return True
        return self.snapshots is not None and self.snapshots.num_yielding > 0

    def can_go_on(self, request: Request) -> bool:
        """Whether a request can continue after its last steps were rolled back: a state that has advanced cannot be."""
        return self.pool is None or not (request.num_cached or request.snapshots)

    def usable(self, match: Match) -> Match:
        """The longest part of a match from which a request can start."""
        return match if self.snapshots is None else self.snapshots.tree.cut_to_payload(match)

    def plan_snapshots(self, request: Request, start: int, fork: int) -> None:
        """Decide after which tokens a request will keep its state. It starts from the state after `start` tokens, and the prefix cache has
        its tokens up to `fork`."""
        if self.snapshots is not None:
            request.tokens_without_state = fork - start
            request.snapshot_points, request.spare_points = self._points.of(len(request.tokens), start, fork)

    def take_slot(self, request: Request) -> None:
        """Give a request that is about to run a slot, filled with the state at the end of its prefix; `free` takes it back."""
        if self.snapshots is not None:
            request.state_slot = self.snapshots.slot_for_request(request.lock if request.num_cached else None)
        elif self.allocator is not None:
            request.state_slot = self.allocator.allocate()

    def take_checkpoints(self, requests: Sequence[Request], counts: Iterable[int]) -> dict[int, list[StateCheckpoint]]:
        """The states to save within a step of `counts` tokens of each request, and their slots, by index of the request. After the launch
        call `keep`. If the launch fails, call nothing: the next step uses the slots."""
        if self.snapshots is None:
            return {}
        found = {}
        for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
            if not request.snapshot_points:
                continue
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

    def keep(self, requests: Sequence[Request]) -> None:
        """After a launch: the requests own the checkpoints of the step, and a copy of the state of each request that ends the step at one
        of its snapshot points. `share` puts both into the prefix cache once a token has validated them."""
        if self.snapshots is None:
            return
        for request in requests:
            while request.snapshot_points and request.snapshot_points[0] <= request.num_cached:
                point = request.snapshot_points.pop(0)
                slot = request.taken_slots.pop(point, None)
                if point == request.num_cached and (slot := slot or self.snapshots.take()) is not None:
                    self.snapshots.fill(slot, request.state_slot)
                if slot is not None:
                    request.snapshots[point] = slot

    def share(self, request: Request) -> None:
        """Attach the states that a request kept to the prefix cache, which already has its pages."""
        for point in sorted(request.snapshots):  # ascending, so that among states of equal age the longest prefix is evicted last
            assert self.snapshots is not None
            node = self.snapshots.tree.match(request.tokens[:point], request.prefix_key).node
            self.snapshots.attach(node, request.snapshots.pop(point), point in request.spare_points)

    def share_last(self, request: Request) -> None:
        """Hand the slot of a request that ends or is preempted to the prefix cache, if its tokens fill their last page."""
        if self.snapshots is None or request in self._share_no_last:
            return
        if request.num_validated != request.num_cached or not request.num_cached == request.num_locked > 0:
            return
        if request.lock.payload is None and self.snapshots.take_over(request.state_slot):
            self.snapshots.attach(request.lock, request.state_slot)
            request.state_slot = 0

    @contextmanager
    def without_sharing_last(self, requests: Collection[Request]) -> Iterator[None]:
        """Inside, `share_last` does nothing for these requests: their state may be ahead of their tokens because a step failed, or their
        slot is needed. May be nested."""
        before, self._share_no_last = self._share_no_last, [*self._share_no_last, *requests]
        try:
            yield
        finally:
            self._share_no_last = before

    def free(self, request: Request) -> None:
        """Take all slots from a request: its own, and those of states that were not shared."""
        for slot in (*request.snapshots.values(), *request.taken_slots.values()):
            assert self.snapshots is not None
            self.snapshots.drop(slot)
        if request.state_slot:
            assert self.allocator is not None
            self.allocator.free(request.state_slot)
        request.state_slot, request.snapshot_points, request.spare_points = 0, [], set()
        request.snapshots, request.taken_slots = {}, {}
