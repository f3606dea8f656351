"""Pages and state slots of requests: taken from their allocators, shared through the prefix cache, given back whatever happens."""

from __future__ import annotations

from paged_attn.attn_ops.page_allocator import PageAllocator
from paged_attn.attn_ops.radix_cache import RadixCache
from paged_attn.attn_ops.state_pool import SlotAllocator
from paged_attn.engine.request import Request


class KVManager:
    """Owns the allocators and the radix tree.

    A request's leading `num_locked` tokens lie in pages of the tree, under its lock; its other pages are its own.

    Args:
        num_state_slots: slots of the model's recurrent state, slot 0 included; 0 for a model that has none.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool, num_state_slots: int = 0) -> None:
        self.allocator = PageAllocator(num_pages, page_size)
        self.tree = RadixCache(self.allocator) if prefix_cache else None
        self.page_size = page_size
        self.state_slots = SlotAllocator(num_state_slots) if num_state_slots else None

    @property
    def num_available(self) -> int:
        """Pages that a request could get now: free ones and those that can be evicted."""
        return self.allocator.num_free + (self.tree.evictable_pages if self.tree else 0)

    @property
    def num_usable(self) -> int:
        return self.allocator.num_usable

    @property
    def can_admit(self) -> bool:
        """Whether one more request could have a state slot."""
        return self.state_slots is None or self.state_slots.num_free > 0

    def take_state_slot(self, request: Request) -> None:
        """Give a request that is about to run its slot, where the model has recurrent state; `release` takes it back."""
        if self.state_slots is not None:
            request.state_slot = self.state_slots.allocate()

    def adopt_prefix(self, request: Request) -> None:
        """Give a request without pages the longest cached prefix; its last token is always left to compute."""
        if self.tree is None:
            return
        match = self.tree.match(request.tokens[:-1], request.namespace)
        self.tree.lock(match.node)
        request.lock, request.pages = match.node, list(match.pages)
        request.num_cached = request.num_locked = match.num_tokens

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Make room for the first `num_tokens` tokens; False, and nothing changed, if the pages are not to be had."""
        missing = self.allocator.pages_for(num_tokens) - len(request.pages)
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        if self.tree is not None and missing > self.allocator.num_free:
            self.tree.evict(missing - self.allocator.num_free)
        request.pages += self.allocator.allocate(missing)
        return True

    def share(self, request: Request) -> None:
        """Put the request's full pages into the tree; where the tree has the same prefix already, its page replaces ours."""
        if self.tree is None or request.num_cached // self.page_size * self.page_size <= request.num_locked:
            return
        inserted = self.tree.insert(request.tokens[: request.num_cached], request.pages, request.namespace)
        self.tree.lock(inserted.node)
        self.tree.unlock(request.lock)
        request.lock = inserted.node
        request.num_locked = request.num_cached // self.page_size * self.page_size
        for position, mine, trees in inserted.duplicates:
            request.pages[position] = trees
            self.allocator.free([mine])

    def release(self, request: Request, *, share: bool) -> None:
        """Take all pages from a request; with `share` its full pages stay in the tree for others. Safe to call twice."""
        if share:
            self.share(request)
        self.allocator.free(request.pages[request.num_locked // self.page_size :])
        if request.lock is not None:
            assert self.tree is not None
            self.tree.unlock(request.lock)
        if request.state_slot:
            assert self.state_slots is not None
            self.state_slots.free(request.state_slot)
        request.pages, request.num_cached, request.num_locked, request.lock, request.state_slot = [], 0, 0, None, 0
