"""Who owns which page, under any order of events; and that a page found in the prefix cache holds what it should."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.requests.request import Request
from tests.engine.memory.radix_invariants import check_invariants
from tests.engine.models import request_of


def computed(kv: KVManager, tokens: list[int], namespace: Any = None) -> Request:
    """A request whose prompt was just computed."""
    request = request_of(tokens, namespace)
    kv.adopt_prefix(request)
    assert kv.reserve(request, len(tokens))
    request.num_cached = request.num_validated = len(tokens)
    return request


class PageOwnership(RuleBasedStateMachine):
    """Random requests against a model of every slot's content: the whole prefix that its K and V depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(num_pages=14, page_size=2, prefix_cache=self.prefix_cache)
        self.requests: list[Request] = []
        self.content: dict[tuple[int, int], Any] = {}

    prefix_cache = True

    def pick(self, data: st.DataObject) -> Request:
        return self.requests[data.draw(st.integers(0, len(self.requests) - 1))]

    def belongs(self, request: Request, position: int) -> Any:
        return request.namespace, tuple(request.tokens[: position + 1])

    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=14), namespace=st.sampled_from([None, "a"]))
    def adopt(self, tokens: list[int], namespace: Any) -> None:
        request = request_of(tokens, namespace)
        expected = self.kv.cached_tokens(request)
        self.kv.adopt_prefix(request)
        assert request.num_cached == expected < len(tokens) and request.num_cached % 2 == 0
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        request = self.pick(data)
        end = min(request.num_cached + count, len(request.tokens))
        before = list(request.pages), self.kv.allocator.num_free, self.kv.num_available
        missing = self.kv.allocator.pages_for(end) - len(request.pages)
        fits = self.kv.reserve(request, end)
        assert fits == (missing <= before[2])
        if not fits:
            assert before == (list(request.pages), self.kv.allocator.num_free, self.kv.num_available)
            return
        for position in range(request.num_cached, end):
            self.content[request.pages[position // 2], position % 2] = self.belongs(request, position)
        request.num_cached = end

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(1, 2))
    def generate(self, data: st.DataObject, token: int) -> None:
        request = self.pick(data)
        if request.num_cached == len(request.tokens):
            request.tokens.append(token)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def vouch(self, data: st.DataObject) -> None:
        request = self.pick(data)
        request.num_validated = request.num_cached

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        request = self.pick(data)
        before = request.num_locked
        self.kv.share(request)
        if self.kv.tree is not None:
            assert request.num_locked == max(before, request.num_validated // 2 * 2)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), share=st.booleans(), again=st.booleans())
    def release(self, data: st.DataObject, share: bool, again: bool) -> None:
        request = self.pick(data)
        self.kv.release(request, share=share)
        assert (list(request.pages), request.num_cached, request.num_locked, request.lock) == ([], 0, 0, None)
        if again:
            self.kv.release(request, share=share)
        self.requests.remove(request)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        allocator, tree = self.kv.allocator, self.kv.tree
        owned = [page for request in self.requests for page in request.pages[request.num_locked // 2 :]]
        assert len(set(owned)) == len(owned), "two requests own one page"
        cached = set(tree._owned) if tree else set()
        assert cached.isdisjoint(owned)
        assert allocator.num_free + len(owned) + len(cached) == allocator.num_usable
        assert all(allocator.is_allocated(page) for page in [*owned, *cached])
        if tree:
            check_invariants(tree)
            locked = {page for request in self.requests for page in request.pages[: request.num_locked // 2]}
            assert locked <= cached and tree.locked_pages == len(locked)

    @invariant()
    def every_cached_token_is_where_the_request_looks_for_it(self) -> None:
        for request in self.requests:
            for position in range(request.num_cached):
                assert self.content[request.pages[position // 2], position % 2] == self.belongs(request, position)

    def teardown(self) -> None:
        for request in self.requests:
            self.kv.release(request, share=False)
        if self.kv.tree:
            self.kv.tree.clear()
        assert self.kv.allocator.num_free == self.kv.num_usable == self.kv.num_available


class PageOwnershipWithoutCache(PageOwnership):
    prefix_cache = False


PageOwnership.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
PageOwnershipWithoutCache.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestPageOwnership = PageOwnership.TestCase
TestPageOwnershipWithoutCache = PageOwnershipWithoutCache.TestCase


def test_the_last_token_is_always_left_to_compute() -> None:
    kv = KVManager(20, 4, True)
    kv.release(computed(kv, list(range(1, 9))), share=True)
    for length, cached in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)):
        request = request_of(list(range(1, length + 1)))
        assert kv.cached_tokens(request) == cached
        kv.adopt_prefix(request)
        assert request.num_cached == request.num_locked == cached
        kv.release(request, share=False)


def test_a_second_copy_of_a_prefix_gives_its_pages_back_and_uses_the_first() -> None:
    kv = KVManager(20, 4, True)
    first, second = computed(kv, [5] * 10), computed(kv, [5] * 10)
    assert set(first.pages).isdisjoint(second.pages)
    kv.share(first)
    free, own_tail = kv.allocator.num_free, second.pages[2]
    kv.share(second)
    assert list(second.pages) == [*first.pages[:2], own_tail]
    assert kv.allocator.num_free == free + 2


def test_eviction_takes_the_least_recently_used_and_never_a_locked_page() -> None:
    kv = KVManager(9, 4, True)  # 8 usable
    for token in (1, 2):
        kv.release(computed(kv, [token] * 9), share=True)  # 2 full pages each
    locked = request_of([1] * 9)  # and so 2 is the least recently used
    kv.adopt_prefix(locked)
    assert kv.allocator.num_free == 4 and kv.num_available == 6
    request = request_of([3] * 24)
    kv.adopt_prefix(request)
    assert not kv.reserve(request, 28) and kv.allocator.num_free == 4, "7 pages are not to be had, and nothing may be evicted for them"
    assert kv.tree is not None and kv.reserve(request, 20) and kv.tree.num_pages == 3, "one page was missing, and one was evicted"
    assert kv.reserve(request, 24) and kv.num_available == 0
    for token, found in ((1, 8), (2, 0)):
        assert kv.tree.match([token] * 9).num_tokens == found


@pytest.mark.parametrize("namespace", ["a", 0, ("tenant", 7)])
def test_namespaces_share_nothing(namespace: Any) -> None:
    kv = KVManager(20, 4, True)
    kv.release(computed(kv, [5] * 9, namespace), share=True)
    for other in {None, "a", "b", 0, ("tenant", 7)}:
        request = request_of([5] * 9, other)
        kv.adopt_prefix(request)
        assert request.num_cached == (8 if other == namespace else 0)
        kv.release(request, share=False)


def test_only_tokens_that_finite_logits_vouch_for_are_shared() -> None:
    kv = KVManager(20, 4, True)
    request = request_of([5] * 17)
    kv.adopt_prefix(request)
    assert kv.reserve(request, 17)
    request.num_cached, request.num_validated = 17, 9  # the step with the rest is under way, or gave NaN
    kv.share(request)
    assert kv.tree is not None and kv.tree.num_pages == 2 and request.num_locked == 8
    kv.release(request, share=True)
    assert kv.tree.num_pages == 2
