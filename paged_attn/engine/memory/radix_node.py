"""The node of the radix tree in `radix_cache`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class RadixNode:
    """One edge of the tree and the node at its end. Callers hold it as a handle and only read it.

    Attributes:
        namespace: the namespace that the node lives in.
        tokens: the token ids on the edge, a whole number of pages; empty for a root only.
        pages: the pages that hold these tokens, in order.
        parent: the node above; None for a root, and for a node that was evicted.
        children: the nodes below, by the tuple of token ids of their first page.
        own_locks: locks taken on this very node.
        lock_count: locks on this node and on everything below it; 0 means that it may be evicted.
        last_access: the tick of the last match or extend that went through the node; larger is more recent.
        payload: what a user attached to the prefix that ends here, or None. A split leaves it with the lower half, which ends here.
    """

    namespace: Hashable
    tokens: list[int]
    pages: list[int]
    parent: RadixNode | None
    last_access: int = 0
    children: dict[tuple[int, ...], RadixNode] = field(default_factory=dict, init=False)
    own_locks: int = field(default=0, init=False)
    lock_count: int = field(default=0, init=False)
    payload: Any = field(default=None, init=False)

    def __repr__(self) -> str:
        state = "root" if self.is_root else "evicted" if self.is_evicted else f"lock_count={self.lock_count}"
        return f"RadixNode({len(self.tokens)} tokens, {len(self.pages)} pages, namespace={self.namespace!r}, {state})"

    @property
    def is_root(self) -> bool:
        """Whether this is the (pageless) top of a namespace."""
        return not self.tokens

    @property
    def is_evicted(self) -> bool:
        """Whether the node was removed from the tree, and its pages freed."""
        return self.parent is None and not self.is_root

    @property
    def is_evictable(self) -> bool:
        """Whether the node can be evicted right now: an unlocked leaf in the tree."""
        return self.parent is not None and not self.children and self.lock_count == 0

    def key(self, page_size: int) -> tuple[int, ...]:
        """What the parent files this node under: the tokens of its first page."""
        return tuple(self.tokens[:page_size])

    def shared_pages(self, tokens: Sequence[int], start: int, page_size: int) -> int:
        """How many leading pages of the edge equal `tokens[start:]`, in O(tokens compared)."""
        return num_common(self.tokens, tokens, shift=start) // page_size

    def split(self, num_pages: int, page_size: int) -> RadixNode:
        """Puts a new node with the first `num_pages` pages above this one, which keeps the rest; returns the new node.

        This object stays the lower half, so that handles and locks on it still cover the whole prefix. The cost is
        that of the lower half only: cutting a few pages off the end of a long edge is cheap.
        """
        assert self.parent is not None and 0 < num_pages < len(self.pages)
        parent, old_key = self.parent, self.key(page_size)
        cut = num_pages * page_size
        upper = RadixNode(self.namespace, self.tokens, self.pages, parent, self.last_access)
        self.tokens, self.pages = self.tokens[cut:], self.pages[num_pages:]
        del upper.tokens[cut:], upper.pages[num_pages:]
        upper.lock_count = self.lock_count
        upper.children[self.key(page_size)] = self
        parent.children[old_key] = upper
        self.parent = upper
        return upper


def num_common(one: Sequence[int], other: Sequence[int], known: int = 0, shift: int = 0) -> int:
    """How many leading tokens of `one` equal `other[shift:]`; it is known that the first `known` do."""
    low, high = known, min(len(one), len(other) - shift)
    probe = high
    while low < high:  # a bisection over slices, which are compared in C; mostly the first comparison hits
        if one[low:probe] == other[shift + low : shift + probe]:
            low = probe
        else:
            high = probe - 1
        probe = (low + high + 1) // 2
    return low
