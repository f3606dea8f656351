"""Copies of recurrent states at the ends of cached prefixes, so that a request can start from one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.attn_ops.kv.radix_cache import RadixCache
from paged_attn.attn_ops.kv.radix_node import RadixNode
from paged_attn.attn_ops.kv.state_pool import SlotAllocator


class StateSnapshots:
    """A radix tree whose nodes carry snapshots: a node's payload is the slot that holds the state after its last token.

    A snapshot is first the taker's alone (`take`), then the tree's (`attach`). Those of the tree go with their node, or, least recently
    used first, when a slot is needed: a locked node may lose its snapshot, for who starts from one copies it at once.

    Args:
        slots: hands out the slots for snapshots.
        copy: makes its second slot hold what its first one holds (`StatePool.copy`).
    """

    def __init__(self, allocator: PageAllocator, slots: SlotAllocator, copy: Callable[[int, int], None]) -> None:
        self.slots, self._copy = slots, copy
        self.tree = RadixCache(allocator, on_payload_removed=self._removed)
        self._attached: OrderedDict[int, RadixNode] = OrderedDict()  # least recently used first

    @property
    def num_attached(self) -> int:
        """Snapshots in the tree."""
        return len(self._attached)

    def take(self, state_slot: int) -> int | None:
        """A copy of the state in `state_slot`, the taker's until it is attached or dropped; None if takers hold all slots."""
        if not self.slots.num_free:
            if not self._attached:
                return None
            self.tree.detach(next(iter(self._attached.values())))
        slot = self.slots.allocate()
        self._copy(state_slot, slot)
        return slot

    def attach(self, node: RadixNode, slot: int) -> None:
        """Give a taken snapshot to the node that ends where it was taken; one that is there already stays, and this one is dropped."""
        if node.payload is not None:
            self._attached.move_to_end(node.payload)
            self.drop(slot)
            return
        self.tree.attach(node, slot)
        self._attached[slot] = node

    def drop(self, slot: int) -> None:
        """Free a snapshot that was taken and not attached."""
        self.slots.free(slot)

    def restore(self, node: RadixNode, state_slot: int) -> None:
        """Let `state_slot` hold the state after the node's last token."""
        self._attached.move_to_end(node.payload)
        self._copy(node.payload, state_slot)

    def _removed(self, slot: int) -> None:
        del self._attached[slot]
        self.slots.free(slot)
