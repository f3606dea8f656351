"""What must hold of a radix tree at all times. For tests: a check visits every node."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from paged_attn.attn_ops.kv.eviction import EvictionQueue
from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.attn_ops.kv.radix_node import RadixNode


def check_tree(roots: Mapping[Hashable, RadixNode], queue: EvictionQueue, allocator: PageAllocator) -> tuple[set[int], int, int]:
    """Asserts the structure below `roots`; returns the pages in the tree, how many of them are unlocked, and how many nodes have payloads.

    Raises:
        AssertionError: an invariant is broken; the message names the node.
    """
    pages: set[int] = set()
    unlocked = candidates = payloads = 0
    for namespace, root in roots.items():
        assert root.is_root and root.parent is None and not root.pages, f"{root} is no root"
        assert root.children, f"{root} is empty and should have been dropped"
        assert root.payload is None, f"{root} has a payload, but no prefix ends there"
        stack = [root]
        while stack:
            node = stack.pop()
            assert node.namespace == namespace, f"{node} is filed under namespace {namespace!r}"
            below = sum(child.lock_count for child in node.children.values())
            assert node.own_locks >= 0, f"{node} has {node.own_locks} locks of its own"
            assert node.lock_count == node.own_locks + below, f"{node}: {node.own_locks} own locks, {below} below"
            assert (node in queue) == node.is_evictable, f"{node} is queued for eviction or evictable, but not both"
            candidates += node.is_evictable
            payloads += node.payload is not None
            unlocked += len(node.pages) if node.lock_count == 0 else 0
            for key, child in node.children.items():
                _check_edge(node, key, child, allocator)
                assert pages.isdisjoint(child.pages), f"{child} holds a page that another node holds"
                pages.update(child.pages)
                stack.append(child)
    assert len(queue) == candidates, f"{len(queue)} nodes queued for eviction, {candidates} evictable"
    return pages, unlocked, payloads


def _check_edge(parent: RadixNode, key: tuple[int, ...], child: RadixNode, allocator: PageAllocator) -> None:
    page_size = allocator.page_size
    assert child.parent is parent, f"{child} does not point back to its parent {parent}"
    assert child.pages and len(child.tokens) == len(child.pages) * page_size, f"{child} is not page-aligned"
    assert key == child.key(page_size), f"{child} is filed under {key}, not under its first page"
    assert len(set(child.pages)) == len(child.pages), f"{child} holds a page twice: {child.pages}"
    for page in child.pages:
        assert allocator.is_allocated(page), f"{child} holds page {page}, which is not allocated"
