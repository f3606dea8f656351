"""Recurrent states of requests: a slot while they run, and the checkpoints they keep for the prefix cache."""

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
    """Owns the slots of a `StatePool`. Of a model without recurrent layers all of this does nothing.

    Args:
        pool: None of such a model.
        pages: of the prefix cache whose nodes carry snapshots.
        prefix_cache: whether there is one; it carries snapshots if `slots` has some to keep.
        interval: see `SnapshotPoints`.

    Attributes:
        allocator: of slots; None without a pool.
        snapshots: None where no states are kept.
    """

    def __init__(self, pool: StatePool | None, slots: StateSlots, pages: PageAllocator, prefix_cache: bool, interval: int) -> None:
        self.pool = pool
        self.allocator = SlotAllocator(slots.total) if pool else None
        self.snapshots: StateSnapshots | None = None
        if prefix_cache and pool is not None and self.allocator is not None and slots.kept:
            self.snapshots = StateSnapshots(pages, self.allocator, pool.copy, slots.kept, slots.reserved)
        self._points = SnapshotPoints(pages.page_size, interval, slots.kept)
        self._leave_none: Collection[Request] = ()

    @property
    def num_snapshots(self) -> int:
        """States that are kept at the ends of cached prefixes."""
        return 0 if self.snapshots is None else self.snapshots.num_attached

    @property
    def snapshot_bytes(self) -> int:
        """What these take of the memory for states."""
        return 0 if self.pool is None else self.num_snapshots * self.pool.slot_bytes

    @property
    def num_in_use(self) -> int:
        """Slots that requests have, and those that they fill for the prefix cache."""
        return 0 if self.allocator is None else self.allocator.num_held - self.num_snapshots

    @property
    def can_admit(self) -> bool:
        """Whether one more request could have a slot: a free one, or that of a snapshot which gives way."""
        if self.allocator is None or self.allocator.num_free:
            return True
        return self.snapshots is not None and self.snapshots.num_yielding > 0

    def can_go_on(self, request: Request) -> bool:
        """Whether a request still has its state if its last steps did not happen: one that has advanced cannot be taken back."""
        return self.pool is None or not (request.num_cached or request.snapshots)

    def usable(self, match: Match) -> Match:
        """The longest part of a match that a request can start from."""
        return match if self.snapshots is None else self.snapshots.tree.cut_to_payload(match)

    def plan_snapshots(self, request: Request, start: int, fork: int) -> None:
        """For a request that starts from the state after `start` tokens, and whose tokens are cached up to `fork`: where it will keep its
        state."""
        if self.snapshots is not None:
            request.tokens_without_state = fork - start
            request.snapshot_points, request.spare_points = self._points.of(len(request.tokens), start, fork)

    def take_slot(self, request: Request) -> None:
        """Give a request that is about to run its slot, filled with the state at the end of its prefix; `free` takes it back."""
        if self.snapshots is not None:
            request.state_slot = self.snapshots.slot_for_request(request.lock if request.num_cached else None)
        elif self.allocator is not None:
            request.state_slot = self.allocator.allocate()

    def take_checkpoints(self, requests: Sequence[Request], counts: Iterable[int]) -> dict[int, list[StateCheckpoint]]:
        """For a step of so many tokens of each request: by index, which states it shall keep on the way, and in which slots. If it was
        launched, `keep` comes next; if it fails, nothing, and the next step may have the slots."""
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
        """After a step was launched: what it kept on the way is the requests', and so is a copy of the state of those that have just come
        to one of their points. Both are shared once a token has validated them."""
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
        """Attach the states that a request kept to the prefix cache, which has its pages by now."""
        for point in sorted(request.snapshots):  # ascending, so that among states of equal age the longest prefix goes last
            assert self.snapshots is not None
            node = self.snapshots.tree.match(request.tokens[:point], request.prefix_key).node
            self.snapshots.attach(node, request.snapshots.pop(point), point in request.spare_points)

    def share_last(self, request: Request) -> None:
        """Leave the state of a request that ends or is preempted in its slot, for others, if its tokens fill their last page: where `lock`
        ends."""
        if self.snapshots is None or request in self._leave_none:
            return
        if request.num_validated != request.num_cached or not request.num_cached == request.num_locked > 0:
            return
        if request.lock.payload is None and self.snapshots.take_over(request.state_slot):
            self.snapshots.attach(request.lock, request.state_slot)
            request.state_slot = 0

    @contextmanager
    def leaving_none(self, requests: Collection[Request]) -> Iterator[None]:
        """Inside, those of these requests that end or are preempted leave no state behind: it may be ahead of their tokens, as a step
        failed that was for them, or another request is to have its slot. May be nested."""
        before, self._leave_none = self._leave_none, [*self._leave_none, *requests]
        try:
            yield
        finally:
            self._leave_none = before

    def free(self, request: Request) -> None:
        """Take all slots from a request: its own, and those of states that are not shared."""
        for slot in (*request.snapshots.values(), *request.taken_slots.values()):
            assert self.snapshots is not None
            self.snapshots.drop(slot)
        if request.state_slot:
            assert self.allocator is not None
            self.allocator.free(request.state_slot)
        request.state_slot, request.snapshot_points, request.spare_points = 0, [], set()
        request.snapshots, request.taken_slots = {}, {}
