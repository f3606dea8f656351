"""Recurrent states at the ends of cached prefixes, from which requests can start, and where prompts take them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain

from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.attn_ops.kv.state_pool import SlotAllocator
from paged_attn.engine.memory.radix_cache import RadixCache
from paged_attn.engine.memory.radix_node import RadixNode

NO_SLOT = 0
SHARED = 2  # locks from which on a node's prefix counts as used by several requests
MIN_FORK = 16  # tokens that a state at a fork must save to be worth a snapshot
SHARE = 8  # one prompt uses at most 1/8 of the slots for snapshots at regular distances


class SnapshotPoints:
    """After how many tokens of a prompt its state is worth a snapshot: all whole pages.

    Args:
        interval: tokens between states of a long prompt, rounded up to whole pages; 0: none but at its end and at forks.
        slots: for snapshots, in all. The interval of a prompt is doubled until it leaves no more than its share of them, so that equal
            beginnings of prompts have states at equal places.
    """

    def __init__(self, page_size: int, interval: int, slots: int) -> None:
        self.page_size, self._most = page_size, slots // SHARE
        self._interval = -(-interval // page_size) * page_size if self._most else 0

    def of(self, num_tokens: int, start: int, fork: int) -> tuple[list[int], set[int]]:
        """For a request of so many tokens that starts from the state after `start` of them: all points, ascending, and which of them are
        only regular ones.

        The others are the last page boundary before its final token, and `fork`, where it leaves what is cached without a state.
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

    Slots are those of running requests, too: snapshots have what requests leave, and give way to them. A slot is first the taker's alone
    (`take`), who fills it, then the tree's (`attach`). Those of the tree go with their node, or when a slot is needed: spare ones that
    nobody started from, the oldest first, and then the least recently used; last of all, and for requests alone, those in whose prefix
    several requests run. A locked node may lose its snapshot, for who starts from one copies it at once.

    Args:
        slots: hands out slots to requests and to snapshots.
        copy: makes its second slot hold what its first one holds (`StatePool.copy`).
        most: slots that takers and the tree may have.
        reserved: snapshots that do not give way to requests.
    """

    def __init__(self, allocator: PageAllocator, slots: SlotAllocator, copy: Callable[[int, int], None], most: int, reserved: int) -> None:
        self.slots, self._copy, self._most, self._reserved = slots, copy, most, reserved
        self.tree = RadixCache(allocator, on_payload_removed=self._removed)
        self.taken: set[int] = set()  # slots that their takers have neither attached nor dropped
        self._spare: dict[int, RadixNode] = {}  # the oldest first
        self._used: OrderedDict[int, RadixNode] = OrderedDict()  # least recently used first
        self._stays_held = NO_SLOT  # a slot that stays with its request when its node loses it

    @property
    def num_attached(self) -> int:
        """Snapshots in the tree."""
        return len(self._spare) + len(self._used)

    @property
    def num_yielding(self) -> int:
        """Snapshots that give way to requests."""
        return max(self.num_attached - self._reserved, 0)

    def slot_for_request(self, node: RadixNode | None) -> int:
        """A slot for a request that starts from a node's snapshot, and holds that; without a node it holds anything.

        Raises:
            ValueError: none is free, and no snapshot gives way.
        """
        if node is not None:
            self._use(node)
        if not self.slots.num_free and self.num_yielding:
            first = self._first() or next(chain(self._spare.values(), self._used.values()))
            if node is not None and first is node:  # its slot is the request's from now on
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
        """A slot that holds anything, the taker's until it is attached or dropped; None if requests, takers and shared prefixes have
        them all."""
        if not self._may_have_one_more() or (not self.slots.num_free and not self._detach_first()):
            return None
        slot = self.slots.allocate()
        self.taken.add(slot)
        return slot

    def take_over(self, slot: int) -> bool:
        """Make a request's slot one that is taken; False, and it stays the request's, if there are as many as there may be."""
        if not self._may_have_one_more():
            return False
        self.taken.add(slot)
        return True

    def _may_have_one_more(self) -> bool:
        return len(self.taken) + self.num_attached < self._most or self._detach_first()

    def fill(self, slot: int, state_slot: int) -> None:
        """Let a taken slot hold what `state_slot` holds."""
        self._copy(state_slot, slot)

    def attach(self, node: RadixNode, slot: int, spare: bool = False) -> None:
        """Give a taken slot, with the state after the node's last token, to the node; one that is there already stays, and this one is
        dropped."""
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
        """Whose snapshot goes for another one."""
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
