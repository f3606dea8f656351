"""Which cached prefix goes first: eviction policies, and the queue that keeps candidates in their order."""

from __future__ import annotations

import heapq
from typing import Any, Final, Protocol

from paged_attn.attn_ops.kv.radix_node import RadixNode


class Comparable(Protocol):
    """A value that can be ordered against others of its kind."""

    def __lt__(self, other: Any, /) -> bool: ...


class EvictionPolicy(Protocol):
    """Ranks the unlocked leaves of a radix tree."""

    def priority(self, node: RadixNode) -> Comparable:
        """The rank of `node`; the lowest is evicted first, and among equals the one that was ranked first.

        It is asked again whenever the node is used, unlocked, split or becomes a leaf, and kept in between. So it may
        depend on the node (last_access, pages, namespace, ...), but not on time or on other nodes.
        """
        ...


class LeastRecentlyUsed:
    """Evicts what no match or insert has gone through for longest. The default."""

    def priority(self, node: RadixNode) -> int:
        """The tick of the last use."""
        return node.last_access


DEFAULT_POLICY: Final[EvictionPolicy] = LeastRecentlyUsed()


class EvictionQueue:
    """The evictable nodes as a heap with lazy deletion: O(log n) per change, amortised.

    Args:
        policy: ranks the nodes.
    """

    _SLACK = 64

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[Comparable, int, RadixNode]] = []
        self._current: dict[RadixNode, int] = {}  # node -> the ticket of its one valid heap entry
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, node: RadixNode) -> bool:
        return node in self._current

    def update(self, node: RadixNode) -> None:
        """Ranks `node` anew, or takes it out when it is not evictable. Call it after every change of the node."""
        if not node.is_evictable:
            self._current.pop(node, None)
        else:
            self._current[node] = self._next_ticket
            heapq.heappush(self._heap, (self._policy.priority(node), self._next_ticket, node))
            self._next_ticket += 1
        if len(self._heap) > 2 * len(self._current) + self._SLACK:
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def pop(self) -> RadixNode | None:
        """Takes out the node to evict first; None when nothing is evictable."""
        while self._heap:
            _, ticket, node = heapq.heappop(self._heap)
            if self._current.get(node) == ticket:
                del self._current[node]
                return node
        return None
