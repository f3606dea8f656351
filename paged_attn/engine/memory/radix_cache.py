"""Prefix sharing: a radix tree from token ids to the KV pages that hold them.

Follows SGLang's RadixAttention (arXiv:2312.07104), with whole pages as the unit of sharing. A request uses it like this:

    match -> lock(match.node) -> allocate the rest -> run -> extend(match.node) -> free duplicates -> unlock

Lock a match before doing anything that may evict: until then its pages can be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.engine.memory.radix_node import RadixNode
from paged_attn.engine.ranked_queue import RankedQueue


class Match(NamedTuple):
    """The longest cached prefix: its pages, its length in tokens (whole pages), and the node to lock."""

    pages: tuple[int, ...]
    num_tokens: int
    node: RadixNode


class Duplicate(NamedTuple):
    """At this position of the prefix the tree already had a page, not the caller's."""

    position: int
    callers_page: int
    trees_page: int


class Inserted(NamedTuple):
    """The node at which the inserted prefix ends, and the caller's pages that the tree did not take."""

    node: RadixNode
    duplicates: list[Duplicate]


class RadixCache:
    """Maps page-aligned token prefixes to pages. Not thread-safe: one scheduler owns it.

    Namespaces share nothing but the page allocator and the eviction order. There are no block hashes: edges are token ids.

    Args:
        allocator: owns the pages; evicted ones are returned to it. Gives the page size.
        on_payload_removed: called with each payload that leaves the tree: detached, replaced, or removed with its node.
    """

    def __init__(self, allocator: PageAllocator, on_payload_removed: Callable[[Any], None] | None = None) -> None:
        self.page_size = allocator.page_size
        self._allocator = allocator
        self._queue: RankedQueue[RadixNode] = RankedQueue()  # nodes that can be evicted
        self._roots: dict[Hashable, RadixNode] = {}
        self._owned: set[int] = set()
        self._evictable = 0
        self._tick = 0
        self._on_payload_removed = on_payload_removed

    @property
    def num_pages(self) -> int:
        """Pages that the tree owns."""
        return len(self._owned)

    @property
    def evictable_pages(self) -> int:
        """Pages that `evict` could free now."""
        return self._evictable

    @property
    def locked_pages(self) -> int:
        """Pages that a lock keeps from being evicted."""
        return len(self._owned) - self._evictable

    def match(self, tokens: Sequence[int], namespace: Hashable = None) -> Match:
        """Finds the longest cached page-aligned prefix of `tokens`, and marks it as just used.

        Args:
            tokens: token ids, as a list, tuple or array.array (for a tensor, pass its .tolist()).
            namespace: only prefixes inserted under an equal namespace are found.

        Raises:
            TypeError: `tokens` is not a sequence.
        """
        node, pages = self._walk(self._root(namespace), self._aligned(tokens))
        return Match(tuple(pages), len(pages) * self.page_size, node)

    def peek(self, tokens: list[int], namespace: Hashable = None, limit: int | None = None) -> tuple[list[int], list[int]]:
        """The pages that `match` would find for the first `limit` tokens, and after how many pages there are payloads; marks nothing as
        used."""
        pages: list[int] = []
        payloads = []
        for node, shared in self._path(tokens, namespace, len(tokens) if limit is None else limit):
            pages += node.pages[:shared]
            if shared == len(node.pages) and node.payload is not None:
                payloads.append(len(pages))
        return pages, payloads

    def _path(self, tokens: list[int], namespace: Hashable, limit: int) -> Iterator[tuple[RadixNode, int]]:
        """The nodes on the path of the first `limit` tokens, from the root down, and how many pages of each are on it."""
        node, position = self._roots.get(namespace), 0
        while node is not None and position + self.page_size <= limit:
            node = node.children.get(tuple(tokens[position : position + self.page_size]))
            if node is None:
                return
            shared = min(node.shared_pages(tokens, position, self.page_size), (limit - position) // self.page_size)
            position += shared * self.page_size
            yield node, shared
            if shared < len(node.pages):
                return

    def nodes(self) -> Iterator[tuple[RadixNode, int]]:
        """All nodes except roots, in no particular order, each with the length in pages of the prefix that ends there."""
        stack = [(root, 0) for root in self._roots.values()]
        while stack:
            node, end = stack.pop()
            for child in node.children.values():
                stack.append((child, end + len(child.pages)))
                yield stack[-1]

    def extend(self, node: RadixNode, tokens: Sequence[int], pages: Sequence[int]) -> Inserted:
        """Caches the whole pages of `tokens`, which continue the prefix that ends at a node; a partial last page is ignored.

        The tree takes ownership of new pages. Where it already holds the prefix, it keeps its own page: such positions, counted from the
        node, are returned as duplicates, whose pages the caller must free. The time it takes depends only on the new tokens.

        Args:
            node: returned by `match` or `extend`; a match of nothing has the root of its namespace.
            tokens: token ids; the leading len(tokens) // page_size pages are considered.
            pages: the pages that hold them, allocated from this cache's allocator; surplus pages are ignored.

        Raises:
            TypeError: `tokens` is not a sequence.
            ValueError: the node has been evicted, too few pages, a repeated page, or a page that is not allocated or that the tree holds
                for another prefix. Nothing is inserted in that case.
        """
        if node.is_evicted:
            raise ValueError(f"cannot extend {node}: its pages were freed; lock right after match or extend, before evict")
        start = self._root(node.namespace) if node.is_root else node
        aligned = self._aligned(tokens)
        count = len(aligned) // self.page_size
        if len(pages) < count:
            raise ValueError(
                f"extend got {len(pages)} pages for {len(tokens)} tokens, but {count} whole pages of {self.page_size} "
                "tokens need at least as many; pass every page of these tokens, matched ones included"
            )
        mine = list(pages[:count])
        node, theirs = self._walk(start, aligned)
        self._check_pages(mine, theirs)
        duplicates = [
            Duplicate(position, page, kept) for position, (page, kept) in enumerate(zip(mine, theirs, strict=False)) if page != kept
        ]
        if len(theirs) < count:
            new_tokens, new_pages = aligned[len(theirs) * self.page_size :], mine[len(theirs) :]
            leaf = RadixNode(node.namespace, new_tokens, new_pages, node, self._tick)
            node.children[leaf.key(self.page_size)] = leaf
            if start.is_root:
                self._roots[start.namespace] = start
            self._owned.update(new_pages)
            self._evictable += len(new_pages)
            self._update_queue(node)
            self._update_queue(leaf)
            node = leaf
        return Inserted(node, duplicates)

    def lock(self, node: RadixNode) -> None:
        """Keeps `node` and everything above it from being evicted until `unlock` has been called as many times.

        Locking the node of an empty match is allowed and protects nothing.

        Raises:
            ValueError: the node has been evicted since it was returned.
        """
        if node.is_evicted:
            raise ValueError(f"cannot lock {node}: its pages were freed; lock right after match or extend, before evict")
        node.own_locks += 1
        self._add_locks(node, 1)

    def unlock(self, node: RadixNode) -> None:
        """Undoes one `lock` of this node. Raises ValueError: the node itself is not locked (locks on nodes below it do not count)."""
        if node.own_locks == 0:
            raise ValueError(f"cannot unlock {node}: nobody holds a lock on it; unlock each locked node exactly once")
        node.own_locks -= 1
        self._add_locks(node, -1)

    def attach(self, node: RadixNode, payload: Any) -> None:
        """Sets the payload of `node`, replacing the one it had.

        Raises:
            ValueError: no prefix ends at the node (it is a root or was evicted), or the payload is None.
        """
        if node.parent is None or payload is None:
            raise ValueError(f"cannot attach {payload!r} to {node}; match or extend at least a page, and give a payload other than None")
        self.detach(node)
        node.payload = payload

    def detach(self, node: RadixNode) -> None:
        """Removes the payload of `node`, if it has one."""
        payload, node.payload = node.payload, None
        if payload is not None and self._on_payload_removed is not None:
            self._on_payload_removed(payload)

    def cut_to_payload(self, match: Match) -> Match:
        """The longest part of a match that ends at a node with a payload, or the empty match."""
        node, count = match.node, len(match.pages)
        while node.payload is None and node.parent is not None:
            count -= len(node.pages)
            node = node.parent
        return Match(match.pages[:count], count * self.page_size, node)

    def evict(self, num_pages: int) -> int:
        """Returns `num_pages` unlocked pages to the allocator, taken from the ends of the least recently used leaves.

        Returns:
            How many pages were freed; fewer than requested if nothing more can be evicted.

        Raises:
            ValueError: `num_pages` is negative.
        """
        if num_pages < 0:
            raise ValueError(f"asked to evict {num_pages} pages, but the count must be 0 or more")
        freed: list[int] = []
        removed: list[RadixNode] = []
        while len(freed) < num_pages and (node := self._queue.first()) is not None:
            self._queue.discard(node)
            surplus = len(freed) + len(node.pages) - num_pages
            if surplus > 0:
                node.split(surplus, self.page_size)
            freed.extend(node.pages)
            self._remove(node)
            removed.append(node)
        self._evictable -= len(freed)
        self._owned.difference_update(freed)
        self._allocator.free(freed)
        for node in removed:
            self.detach(node)
        return len(freed)

    def clear(self) -> int:
        """Evicts everything that is not locked; returns how many pages were freed."""
        return self.evict(self._evictable)

    def _aligned(self, tokens: Sequence[int]) -> list[int]:
        # Elements of a tensor hash by identity: they would silently never match.
        if not isinstance(tokens, Sequence):
            raise TypeError(f"tokens is a {type(tokens).__name__}, but must be a sequence of int; call .tolist() on it")
        return list(tokens[: len(tokens) // self.page_size * self.page_size])

    def _root(self, namespace: Hashable) -> RadixNode:
        """The root of a namespace. Only the first insert registers it, so lookups leave nothing behind."""
        root = self._roots.get(namespace)
        return RadixNode(namespace, [], [], None) if root is None else root

    def _walk(self, node: RadixNode, tokens: list[int]) -> tuple[RadixNode, list[int]]:
        """Follows `tokens` down from a node, splits the edge where they diverge, and marks the whole path as used."""
        self._tick += 1
        above: RadixNode | None = node
        while above is not None:
            above.last_access, above = self._tick, above.parent
        pages: list[int] = []
        position = 0
        while position < len(tokens):
            child = node.children.get(tuple(tokens[position : position + self.page_size]))
            if child is None:
                break
            shared = child.shared_pages(tokens, position, self.page_size)
            if shared < len(child.pages):
                upper = child.split(shared, self.page_size)
                self._update_queue(child)
                child = upper
            child.last_access = self._tick
            pages += child.pages
            position += shared * self.page_size
            node = child
        self._update_queue(node)
        return node, pages

    def _check_pages(self, mine: list[int], theirs: list[int]) -> None:
        seen: set[int] = set()
        for index, page in enumerate(mine):
            if page in seen:
                raise ValueError(f"extend got page {page} twice; each position of a prefix needs a page of its own")
            seen.add(page)
            if index < len(theirs) and page == theirs[index]:
                continue
            if page in self._owned:
                raise ValueError(
                    f"extend got page {page} at position {index}, but the tree holds it for another prefix; lock "
                    "matched pages until they are inserted again, and write new tokens into new pages"
                )
            if not self._allocator.is_allocated(page):
                raise ValueError(f"extend got page {page} at position {index}, which is not allocated; allocate it first")

    def _add_locks(self, node: RadixNode, delta: int) -> None:
        above: RadixNode | None = node
        while above is not None:
            was_locked = above.lock_count > 0
            above.lock_count += delta
            if was_locked != (above.lock_count > 0):
                self._evictable += len(above.pages) if was_locked else -len(above.pages)
            above = above.parent
        self._update_queue(node)

    def _remove(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None and not node.children and node.lock_count == 0
        del parent.children[node.key(self.page_size)]
        node.parent = None
        if parent.is_root and not parent.children:
            del self._roots[parent.namespace]
        self._update_queue(parent)

    def _update_queue(self, node: RadixNode) -> None:
        """Queue a node that can be evicted by its last use, and take any other out. Must be called after every change of a node."""
        if node.is_evictable:
            self._queue.put(node, node.last_access)
        else:
            self._queue.discard(node)
