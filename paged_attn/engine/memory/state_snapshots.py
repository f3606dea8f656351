"""Snapshots: recurrent states at the ends of cached prefixes, from which requests can start; and after which tokens they are taken."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain

from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.attn_ops.kv.state_pool import SlotAllocator
from paged_attn.engine.memory.radix_cache import RadixCache
from paged_attn.engine.memory.radix_node import RadixNode

NO_SLOT = 0
SHARED = 2  # with this many locks a node's prefix counts as used by several requests
MIN_FORK = 16  # tokens that a state at a fork must save to be worth a snapshot
SHARE = 8  # one prompt uses at most 1/8 of the slots for snapshots at regular distances


class SnapshotPoints:
    """Decides after how many tokens of a prompt, always whole pages, a snapshot is worthwhile.

    Args:
        interval: tokens between states of a long prompt, rounded up to whole pages; 0: only at its end and at forks.
        slots: slots for all snapshots. A prompt's interval is doubled until it uses no more than its share of them, so that prompts with
            equal beginnings have snapshots at equal places.
    """

    def __init__(self, page_size: int, interval: int, slots: int) -> None:
        self.page_size, self._most = page_size, slots // SHARE
        self._interval = -(-interval // page_size) * page_size if self._most else 0

    def of(self, num_tokens: int, start: int, fork: int) -> tuple[list[int], set[int]]:
        """For a request of `num_tokens` tokens that starts from the state after `start` of them: all points, ascending, and the set of
        those that are only regular ones.

        The others are the last page boundary before its final token, and `fork`, up to where its tokens are cached, but without a state.
        """
        last = (num_tokens - 1) // self.page_size * self.page_size
        wanted = {last} if last > start else set[int]()
        if fork - start >= MIN_FORK:
            wanted.add(fork)
        regular = set[int]()
        if self._interval:
            distance = self._interval
            while last // distance - start // distance > self._most:
                distance *= 2
            regular.update(range((start // distance + 1) * distance, last, distance))
        return sorted(wanted | regular), regular - wanted


class StateSnapshots:
    """A radix tree whose nodes carry snapshots: a node's payload is the slot that holds the state after its last token.

    Snapshots and running requests use the same slots: snapshots get what requests leave free, and are evicted for requests. A slot first
    belongs to the caller of `take`, who fills it, then to the tree (`attach`). A snapshot is evicted with its node, or when a slot is
    needed: first spare ones from which no request started, the oldest first; then the least recently used; and last, only for a request,
    those whose prefix several running requests use. A locked node may lose its snapshot: a request that starts from one copies it at once.

    Args:
        slots: the allocator of slots for requests and snapshots.
        copy: copies the state of its first slot to its second (`StatePool.copy`).
        most: the most slots for snapshots, taken or in the tree.
        reserved: how many snapshots are not evicted for requests.
    """

    def __init__(self, allocator: PageAllocator, slots: SlotAllocator, copy: Callable[[int, int], None], most: int, reserved: int) -> None:
        self.slots, self._copy, self._most, self._reserved = slots, copy, most, reserved
        self.tree = RadixCache(allocator, on_payload_removed=self._removed)
        self.taken: set[int] = set()  # slots taken and neither attached nor dropped
        self._spare: dict[int, RadixNode] = {}  # the oldest first
        self._used: OrderedDict[int, RadixNode] = OrderedDict()  # least recently used first
        self._stays_held = NO_SLOT  # a slot that is not freed when its node loses it, because its request keeps it

    @property
    def num_attached(self) -> int:
        """Snapshots in the tree."""
        return len(self._spare) + len(self._used)

    @property
    def num_yielding(self) -> int:
        """Snapshots that may be evicted for requests."""
        return max(self.num_attached - self._reserved, 0)

    def slot_for_request(self, node: RadixNode | None) -> int:
        """A slot for a request, with a copy of the node's snapshot; without a node its contents are arbitrary. Raises ValueError: no slot
        is free, and no snapshot can be evicted."""
        if node is not None:
            self._use(node)
        if not self.slots.num_free and self.num_yielding:
            first = self._first() or next(chain(self._spare.values(), self._used.values()))
            if node is not None and first is node:  # the request keeps this slot
                slot: int = node.payload
                self._stays_held = slot
                self.tree.detach(node)
                self._stays_held = NO_SLOT
                return slot
            self.tree.detach(first)
        free = self.slots.allocate()
        if node is not None:
            self._copy(node.payload, free)
        return free

    def take(self) -> int | None:
        """A slot with arbitrary contents, which belongs to the caller until it is attached or dropped; None if all slots are in use."""
        if not self._may_have_one_more() or (not self.slots.num_free and not self._detach_first()):
            return None
        slot = self.slots.allocate()
        self.taken.add(slot)
        return slot

    def take_over(self, slot: int) -> bool:
        """Turn a request's slot into a taken one; False, with nothing changed, if there are already `most` of them."""
        if not self._may_have_one_more():
            return False
        self.taken.add(slot)
        return True

    def _may_have_one_more(self) -> bool:
        return len(self.taken) + self.num_attached < self._most or self._detach_first()

    def fill(self, slot: int, state_slot: int) -> None:
        """Copy the state of `state_slot` into a taken slot."""
        self._copy(state_slot, slot)

    def attach(self, node: RadixNode, slot: int, spare: bool = False) -> None:
        """Attach a taken slot, with the state after the node's last token; if the node already has a snapshot, drop the slot."""
        if node.payload is not None:
            if not spare:
                self._use(node)
            self.drop(slot)
            return
        self.taken.remove(slot)
        self.tree.attach(node, slot)
        (self._spare if spare else self._used)[slot] = node

    def drop(self, slot: int) -> None:
        """Free a slot that was taken and not attached."""
        self.taken.remove(slot)
        self.slots.free(slot)

    def _first(self) -> RadixNode | None:
        """The node whose snapshot is evicted for another one."""
        return next((node for node in chain(self._spare.values(), self._used.values()) if node.lock_count < SHARED), None)

    def _detach_first(self) -> bool:
        first = self._first()
        if first is not None:
            self.tree.detach(first)
        return first is not None

    def _use(self, node: RadixNode) -> None:
        self._spare.pop(node.payload, None)
        self._used[node.payload] = node
        self._used.move_to_end(node.payload)

    def _removed(self, slot: int) -> None:
        del (self._spare if slot in self._spare else self._used)[slot]
        if slot != self._stays_held:
            self.slots.free(slot)
