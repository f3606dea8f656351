"""Pages of requests: allocated, shared through the prefix cache, and always freed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.engine.memory.budget import NO_STATE, StateSlots
from paged_attn.engine.memory.radix_cache import Match, RadixCache
from paged_attn.engine.memory.radix_node import RadixNode
from paged_attn.engine.memory.request_states import RequestStates
from paged_attn.engine.requests.request import Request
from paged_attn.engine.requests.request_rows import RequestRows


class KVManager:
    """Owns the page allocator, the radix tree and, in `states`, the slots of recurrent state.

    A request's first `num_locked` tokens are in pages of the tree, protected by its lock; it owns its other pages.

    Args:
        slots, state_pool: for the model's recurrent state, if any. Prefixes are then shared only if the cache may keep states.
        snapshot_interval: see `SnapshotPoints`.
        allocator: of pages; by default a `PageAllocator` of `num_pages`.

    Attributes:
        tree: None without a prefix cache.
        version: incremented when pages are released or shared. While it is unchanged, a request that could not be admitted still cannot
            be, except in a manager that `frees_as_it_runs`.
    """

    frees_as_it_runs = False  # whether running requests release pages without ending

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_cache: bool,
        slots: StateSlots = NO_STATE,
        state_pool: StatePool | None = None,
        snapshot_interval: int = 0,
        allocator: PageAllocator | None = None,
    ) -> None:
        self.allocator = allocator or PageAllocator(num_pages, page_size)
        self.page_size = page_size
        self.states = RequestStates(state_pool, slots, self.allocator, prefix_cache, snapshot_interval)
        self.version = 0
        self.tree: RadixCache | None = None
        if self.states.snapshots is not None:
            self.tree = self.states.snapshots.tree
        elif prefix_cache and state_pool is None:
            self.tree = RadixCache(self.allocator)

    @property
    def num_available(self) -> int:
        """Pages that a request could get now: free ones and those that can be evicted."""
        return self.allocator.num_free + self.cached_pages

    @property
    def cached_pages(self) -> int:
        """Pages that only the prefix cache holds, including those whose frames some groups of layers have freed."""
        return 0 if self.tree is None else self.tree.evictable_pages

    @property
    def held_pages(self) -> int:
        """Pages that requests hold, including those whose frames some groups of layers have freed."""
        return self.allocator.num_allocated - self.cached_pages

    @property
    def num_usable(self) -> int:
        return self.allocator.num_usable

    @property
    def max_request_pages(self) -> int:
        """The most pages that one request can have."""
        return self.num_usable

    @property
    def frames(self) -> NDArray[np.int32] | None:
        """[groups, pages] if layers are in groups (see `GroupedAllocator`), else None."""
        return None

    def use_by_retention(self, frame_bytes: int) -> dict[str, tuple[int, int]]:
        """For each kind of group, described by what it keeps: how many pages of the pool requests and the prefix cache use, and bytes."""
        return {}

    def shortfall(self, request: Request) -> int:
        """How many pages are missing to hold all tokens of a request that has adopted its prefix, in the unit of `freed_by`; 0 or less if
        they fit."""
        return self.allocator.pages_for(len(request.tokens)) - request.num_pages - self.num_available

    def freed_by(self, requests: Sequence[Request]) -> int:
        """How many pages releasing all of these requests frees at least: their own, and tree pages that no other request has locked."""
        locks = Counter[RadixNode]()
        for node in (request.lock for request in requests):
            while node is not None:
                locks[node] += 1
                node = node.parent
        own = sum(request.num_pages - request.num_locked // self.page_size for request in requests)
        return own + sum(len(node.pages) for node, count in locks.items() if node.lock_count == count)

    def can_go_on(self, request: Request) -> bool:
        """Whether a request can continue after its last steps were rolled back, without being recomputed."""
        return self.states.can_go_on(request)

    def adopt_prefix(self, request: Request) -> None:
        """Give a request without pages the longest cached prefix (with recurrent state, the longest that has a snapshot). Its last token
        is always left to compute, and so are tokens whose logits are wanted, because the cache holds no logits."""
        if self.tree is None:
            return
        match = self.tree.match(request.tokens[: request.num_reusable], request.prefix_key)
        fork, match = match.num_tokens, self._usable(match, request)
        self.states.plan_snapshots(request, match.num_tokens, fork)
        self.tree.lock(match.node)
        request.lock = match.node
        request.add_pages(match.pages)
        request.num_cached = request.num_locked = match.num_tokens

    def _usable(self, match: Match, request: Request) -> Match:
        """The longest part of a match from which a request can start."""
        return self.states.usable(match)

    def cached_tokens(self, request: Request) -> int:
        """How many tokens `adopt_prefix` would find. Changes nothing."""
        if self.tree is None:
            return 0
        pages, with_state = self.tree.peek(request.tokens, request.prefix_key, request.num_reusable)
        return (len(pages) if self.states.snapshots is None else max(with_state, default=0)) * self.page_size

    def forget_prefixes(self) -> int:
        """Remove everything from the prefix cache that no running request uses; returns how many pages were freed."""
        return 0 if self.tree is None else self.tree.clear()

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Allocate pages for the first `num_tokens` tokens; False, with nothing changed, if there are too few."""
        missing = self.allocator.pages_for(num_tokens) - request.num_pages
        if missing > 0:
            if not self._make_room(missing):
                return False
            request.add_pages(self.allocator.allocate(missing))
        return True

    def _make_room(self, num_pages: int) -> bool:
        """Evict cached prefixes until this many pages are free; False, with nothing changed, if that is impossible."""
        if num_pages > self.num_available:
            return False
        if self.tree is not None and num_pages > self.allocator.num_free:
            self.tree.evict(num_pages - self.allocator.num_free)
        return True

    def add_page_each(self, rows: RequestRows, indices: NDArray[np.int64]) -> bool:
        """Give each of these distinct rows its next page; False, with nothing changed, if there are not enough free pages."""
        if len(indices) > self.allocator.num_free:
            return False
        rows.add_page_each(indices, self.allocator.allocate(len(indices)))
        return True

    def share(self, request: Request) -> None:
        """Put the request's full pages that a token has validated, and its snapshots, into the tree. Where the tree already has the same
        prefix, its page replaces the request's."""
        self._share_pages(request)
        self.states.share(request)

    def _share_pages(self, request: Request) -> None:
        if self.tree is None or request.num_validated // self.page_size * self.page_size <= request.num_locked:
            return
        self.version += 1
        locked, first = request.num_locked, request.num_locked // self.page_size
        assert request.lock is not None
        inserted = self.tree.extend(request.lock, request.tokens[locked : request.num_validated], request.pages[first:])
        self.tree.lock(inserted.node)
        self.tree.unlock(request.lock)
        request.lock = inserted.node
        request.num_locked = request.num_validated // self.page_size * self.page_size
        for position, mine, trees in inserted.duplicates:
            request.replace_page(first + position, trees)
            self._free_duplicate(mine, trees)

    def _free_duplicate(self, page: int, kept: int) -> None:
        """Free a request's page that holds the same tokens as `kept`."""
        self.allocator.free([page])

    def release(self, request: Request, *, share: bool) -> None:
        """Take all pages and slots from a request; with `share`, its validated full pages stay in the tree for others. Safe to call
        twice."""
        if request.num_pages or request.state_slot:
            self.version += 1
        if share:
            self._share_pages(request)
            self.states.share_last(request)
        self.states.free(request)
        self.allocator.free(request.pages[request.num_locked // self.page_size :])
        if request.lock is not None:
            assert self.tree is not None
            self.tree.unlock(request.lock)
        request.clear_pages()
        request.num_cached, request.num_locked, request.lock, request.num_validated = 0, 0, None, 0
