"""What must hold of a radix tree at all times: a check visits every node."""

from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.engine.memory.radix_cache import RadixCache
from paged_attn.engine.memory.radix_node import RadixNode


def check_invariants(cache: RadixCache) -> None:
    """Asserts the structure of the whole tree, its counters and what the allocator knows; the message names the node."""
    pages: set[int] = set()
    unlocked = candidates = 0
    queue = cache._queue
    for namespace, root in cache._roots.items():
        assert root.is_root and root.parent is None and not root.pages, f"{root} is not a root"
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
            unlocked += len(node.pages) if node.lock_count == 0 else 0
            for key, child in node.children.items():
                _check_edge(node, key, child, cache._allocator)
                assert pages.isdisjoint(child.pages), f"{child} holds a page that another node holds"
                pages.update(child.pages)
                stack.append(child)
    assert len(queue) == candidates, f"{len(queue)} nodes queued for eviction, {candidates} evictable"
    assert pages == cache._owned, f"the tree holds pages {sorted(pages)}, but owns {sorted(cache._owned)}"
    assert unlocked == cache._evictable, f"{unlocked} pages are unlocked, but {cache._evictable} are counted"


def num_payloads(cache: RadixCache) -> int:
    """Nodes that carry a payload."""
    return sum(node.payload is not None for node, _ in cache.nodes())


def _check_edge(parent: RadixNode, key: tuple[int, ...], child: RadixNode, allocator: PageAllocator) -> None:
    page_size = allocator.page_size
    assert child.parent is parent, f"{child} does not point back to its parent {parent}"
    assert child.pages and len(child.tokens) == len(child.pages) * page_size, f"{child} is not page-aligned"
    assert key == child.key(page_size), f"{child} is filed under {key}, not under its first page"
    assert len(set(child.pages)) == len(child.pages), f"{child} holds a page twice: {child.pages}"
    for page in child.pages:
        assert allocator.is_allocated(page), f"{child} holds page {page}, which is not allocated"
