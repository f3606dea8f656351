"""Copies of recurrent states at the ends of cached prefixes, so that a request can start from one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain

from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.attn_ops.kv.radix_cache import RadixCache
from paged_attn.attn_ops.kv.radix_node import RadixNode
from paged_attn.attn_ops.kv.state_pool import SlotAllocator


class StateSnapshots:
    """A radix tree whose nodes carry snapshots: a node's payload is the slot that holds the state after its last token.

    A slot is first the taker's alone (`take`), who fills it, then the tree's (`attach`). Those of the tree go with their node, or when a
    slot is needed: spare ones that nobody started from, the oldest first, and then the least recently used. A locked node may lose its
    snapshot, for who starts from one copies it at once.

    Args:
        slots: hands out the slots for snapshots.
        copy: makes its second slot hold what its first one holds (`StatePool.copy`).
    """

    def __init__(self, allocator: PageAllocator, slots: SlotAllocator, copy: Callable[[int, int], None]) -> None:
        self.slots, self._copy = slots, copy
        self.tree = RadixCache(allocator, on_payload_removed=self._removed)
        self._spare: dict[int, RadixNode] = {}  # the oldest first
        self._used: OrderedDict[int, RadixNode] = OrderedDict()  # least recently used first

    @property
    def num_attached(self) -> int:
        """Snapshots in the tree."""
        return len(self._spare) + len(self._used)

    def take(self) -> int | None:
        """A slot that holds anything, the taker's until it is attached or dropped; None if takers hold all."""
        if not self.slots.num_free:
            first = next(chain(self._spare.values(), self._used.values()), None)
            if first is None:
                return None
            self.tree.detach(first)
        return self.slots.allocate()

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
        self.tree.attach(node, slot)
        (self._spare if spare else self._used)[slot] = node

    def drop(self, slot: int) -> None:
        """Free a slot that was taken and not attached."""
        self.slots.free(slot)

    def restore(self, node: RadixNode, state_slot: int) -> None:
        """Let `state_slot` hold the state after the node's last token."""
        self._use(node)
        self._copy(node.payload, state_slot)

    def _use(self, node: RadixNode) -> None:
        self._spare.pop(node.payload, None)
        self._used[node.payload] = node
        self._used.move_to_end(node.payload)

    def _removed(self, slot: int) -> None:
        del (self._spare if slot in self._spare else self._used)[slot]
        self.slots.free(slot)
