"""The radix cache: each behaviour by hand, then all of them at once against a model that knows no tree."""

import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.engine.memory.radix_cache import RadixCache
from tests.engine.memory.radix_invariants import check_invariants, num_payloads


def make(num_pages=64, page_size=2, **kwargs):
    allocator = PageAllocator(num_pages, page_size)
    return allocator, RadixCache(allocator, **kwargs)


def insert(cache, tokens, pages, namespace=None):
    return cache.extend(cache.match([], namespace).node, tokens, pages)


def put(cache, allocator, tokens, namespace=None):
    """Inserts `tokens` in new pages, frees those that were cached already, and returns the node."""
    pages = allocator.allocate(len(tokens) // allocator.page_size)
    inserted = insert(cache, tokens, pages, namespace)
    allocator.free(duplicate.callers_page for duplicate in inserted.duplicates)
    check_invariants(cache)
    return inserted.node


def test_match_is_the_longest_page_aligned_prefix():
    allocator, cache = make(page_size=2)
    pages = allocator.allocate(3)
    insert(cache, [1, 2, 3, 4, 5, 6, 7], pages)
    assert cache.match([1, 2, 3, 4, 5, 6, 7])[:2] == (tuple(pages), 6)
    assert cache.match([1, 2, 3, 4, 5])[:2] == (tuple(pages[:2]), 4)
    assert cache.match((1, 2, 3, 9, 5, 6))[:2] == (tuple(pages[:1]), 2)
    assert cache.match(array.array("q", [1, 2, 3, 4]))[:2] == (tuple(pages[:2]), 4)
    assert cache.match([1, 9, 3, 4])[:2] == cache.match([1])[:2] == cache.match([])[:2] == ((), 0)
    check_invariants(cache)


def test_partial_page_and_surplus_pages_stay_with_the_caller():
    allocator, cache = make(page_size=4)
    inserted = insert(cache, [1, 2, 3, 4, 5], allocator.allocate(2))
    assert (inserted.duplicates, cache.num_pages) == ([], 1)
    assert insert(cache, [1, 2], allocator.allocate(1)).node.is_root


def test_insert_reports_only_pages_that_differ():
    allocator, cache = make(page_size=1)
    first = allocator.allocate(2)
    insert(cache, [1, 2], first)
    other = allocator.allocate(2)
    inserted = insert(cache, [1, 2, 3], [first[0], *other])
    assert inserted.duplicates == [(1, other[0], first[1])]
    assert cache.match([1, 2, 3]).pages == (first[0], first[1], other[1])
    assert cache.match([1, 2, 3]).node is inserted.node


def test_namespaces_share_nothing():
    allocator, cache = make(page_size=1)
    put(cache, allocator, [1, 2], "adapter")
    assert cache.match([1, 2]).num_tokens == cache.match([1, 2], ("adapter", 1)).num_tokens == 0
    put(cache, allocator, [1, 2])
    assert cache.num_pages == 4
    assert set(cache.match([1, 2]).pages).isdisjoint(cache.match([1, 2], "adapter").pages)
    cache.clear()
    check_invariants(cache)  # an emptied namespace leaves no root behind


def test_split_keeps_the_lower_handle_and_its_locks():
    allocator, cache = make(page_size=1)
    node = put(cache, allocator, [1, 2, 3, 4])
    cache.lock(node)
    upper = cache.match([1, 2]).node
    assert cache.match([1, 2, 3, 4]).node is node
    assert (upper.lock_count, upper.own_locks, cache.locked_pages, cache.evict(9)) == (1, 0, 4, 0)
    check_invariants(cache)
    cache.lock(upper)
    cache.unlock(node)
    assert (cache.locked_pages, cache.evict(9)) == (2, 2)
    cache.unlock(upper)
    assert (cache.locked_pages, cache.evictable_pages) == (0, 2)


def test_an_ancestor_is_not_unlocked_through_its_descendant():
    allocator, cache = make(page_size=1)
    node = put(cache, allocator, [1, 2])
    upper = cache.match([1]).node
    cache.lock(node)
    with pytest.raises(ValueError, match="nobody holds a lock on it"):
        cache.unlock(upper)
    cache.unlock(node)
    with pytest.raises(ValueError, match="nobody holds a lock on it"):
        cache.unlock(node)


def test_an_empty_match_can_be_locked_across_insert_and_clear():
    allocator, cache = make(page_size=1)
    root = cache.match([1]).node
    cache.lock(root)
    put(cache, allocator, [1])
    registered = cache.match([2]).node
    cache.lock(registered)
    assert cache.clear() == 1
    put(cache, allocator, [1])
    cache.unlock(root)
    cache.unlock(registered)
    check_invariants(cache)


def test_evict_takes_the_least_recently_used_and_trims_from_the_end():
    allocator, cache = make(page_size=1)
    oldest = put(cache, allocator, [1, 2, 3])
    put(cache, allocator, [4, 5])
    cache.lock(oldest)
    assert cache.evict(1) == 1
    cache.unlock(oldest)
    assert cache.evict(2) == 2  # trimming [4, 5] did not make its rest older than [1, 2, 3]
    assert (cache.match([4, 5]).num_tokens, cache.match([1, 2, 3]).num_tokens) == (1, 1)
    assert cache.evict(1) == 1
    assert (cache.match([4]).num_tokens, cache.match([1]).num_tokens) == (0, 1)
    assert cache.evict(9) == 1
    assert (cache.num_pages, allocator.num_free) == (0, allocator.num_usable)


def test_a_handle_to_evicted_or_trimmed_pages_is_refused():
    allocator, cache = make(page_size=1)
    node = put(cache, allocator, [1, 2])
    cache.evict(1)
    with pytest.raises(ValueError, match="its pages were freed"):
        cache.lock(node)
    check_invariants(cache)


def test_eviction_does_not_rank_the_whole_tree_per_page(monkeypatch):
    allocator, cache = make(num_pages=1001, page_size=1)
    for token in range(1000):
        insert(cache, [token], allocator.allocate(1))
    for _ in range(20_000):
        cache.match([7])
    assert len(cache._queue._heap) <= 2 * 1000 + 64 + 1
    ranked = []
    monkeypatch.setattr(cache._queue, "put", lambda node, rank: ranked.append(node))
    assert [cache.evict(1) for _ in range(500)] == [1] * 500
    assert not ranked
    assert cache.match([7]).num_tokens == 1


def test_nothing_goes_on_from_a_prefix_that_is_gone():
    allocator, cache = make()
    node = insert(cache, [1, 2], allocator.allocate(1)).node
    cache.clear()
    with pytest.raises(ValueError, match=r"cannot extend .*evicted.*: its pages were freed"):
        cache.extend(node, [3, 4], allocator.allocate(1))


def test_refused_inserts_change_nothing():
    allocator, cache = make(num_pages=8, page_size=2)
    held, mine = allocator.allocate(2), allocator.allocate(3)
    insert(cache, [1, 2, 3, 4], held)
    for tokens, pages, message in [
        ([5, 6, 7, 8], mine[:1], "extend got 1 pages for 4 tokens, but 2 whole pages"),
        ([5, 6, 7, 8], [mine[0], mine[0]], f"page {mine[0]} twice"),
        ([1, 2, 5, 6], held, f"page {held[1]} at position 1, but the tree holds it for another prefix"),
        ([1, 2, 3, 4], held[::-1], f"page {held[1]} at position 0, but the tree holds it for another prefix"),
        ([5, 6], [7], "page 7 at position 0, which is not allocated"),
        ([5, 6], [0], "page 0 at position 0, which is not allocated"),
        ([5, 6], [99], "page 99 is out of range"),
    ]:
        with pytest.raises(ValueError, match=message):
            insert(cache, tokens, pages)
        check_invariants(cache)
        assert cache.num_pages == 2 and cache.match([5, 6]).num_tokens == 0
    with pytest.raises(TypeError, match="tokens is a set"):
        cache.match({1, 2})
    with pytest.raises(ValueError, match="asked to evict -1 pages"):
        cache.evict(-1)


def test_invariants_notice_a_page_freed_behind_the_tree():
    allocator, cache = make(page_size=1)
    put(cache, allocator, [1])
    allocator.free([1])
    with pytest.raises(AssertionError, match="page 1, which is not allocated"):
        check_invariants(cache)


def test_a_payload_stays_where_its_prefix_ends():
    removed = []
    allocator, cache = make(page_size=1, on_payload_removed=removed.append)
    node = put(cache, allocator, [1, 2, 3, 4])
    cache.attach(node, "four")
    upper = cache.match([1, 2, 9]).node
    assert (upper.payload, node.payload, num_payloads(cache)) == (None, "four", 1)
    assert cache.cut_to_payload(cache.match([1, 2, 3])) == ((), 0, upper.parent)
    cache.attach(upper, "two")
    put(cache, allocator, [1, 2, 5])
    for tokens, length in (([1, 2, 3, 4, 5], 4), ([1, 2, 3], 2), ([1, 2, 5], 2), ([1, 2], 2), ([1], 0), ([9], 0), ([], 0)):
        match = cache.match(tokens)
        cut = cache.cut_to_payload(match)
        assert (cut.num_tokens, cut.pages) == (length, match.pages[:length])
        assert cut.node.payload == {4: "four", 2: "two", 0: None}[length]
    check_invariants(cache)
    assert removed == []


def test_a_payload_that_leaves_is_told_of_once():
    removed = []
    allocator, cache = make(page_size=1, on_payload_removed=removed.append)
    node = put(cache, allocator, [1, 2, 3])
    for payload in ("old", "new"):
        cache.attach(node, payload)
    assert (removed, num_payloads(cache)) == (["old"], 1)
    cache.lock(node)
    cache.detach(node)
    cache.detach(node)
    assert (removed, num_payloads(cache)) == (["old", "new"], 0)
    cache.attach(node, "end")
    cache.attach(cache.match([1]).node, "start")
    cache.unlock(node)
    assert cache.evict(1) == 1 and removed.pop() == "end", "cut off with its page; what is left of the edge has none"
    assert cache.evict(1) == 1 and num_payloads(cache) == 1
    assert cache.clear() == 1 and removed.pop() == "start"
    assert (removed, num_payloads(cache)) == (["old", "new"], 0)
    check_invariants(cache)


def test_the_tree_has_evicted_when_it_tells_of_a_payload():
    allocator, cache = make(page_size=1, on_payload_removed=lambda _: check_invariants(cache) or seen.append(allocator.num_free))
    seen = []
    cache.attach(put(cache, allocator, [1, 2]), "one")
    cache.clear()
    assert seen == [allocator.num_usable]


def test_a_payload_needs_a_prefix_and_a_value():
    allocator, cache = make(page_size=1)
    node = put(cache, allocator, [1])
    for where, payload in ((node.parent, 1), (node, None), (cache.match([2]).node, 1)):
        with pytest.raises(ValueError, match="cannot attach"):
            cache.attach(where, payload)
    cache.evict(1)
    with pytest.raises(ValueError, match=r"cannot attach 1 to RadixNode.*evicted"):
        cache.attach(node, 1)
    assert num_payloads(cache) == 0


class RadixMachine(RuleBasedStateMachine):
    """The model: (namespace, *prefix) -> [the last page of this cached prefix, the step of its last use]; and payloads by prefix."""

    namespaces = st.sampled_from([None, "a"])
    bits = st.integers(0, 5).flatmap(lambda n: st.lists(st.integers(0, 1), min_size=n, max_size=n))

    @initialize(page_size=st.sampled_from([1, 2, 4]))
    def start(self, page_size):
        self.page_size, self.step = page_size, 0
        self.removed = []
        self.allocator, self.cache = make(num_pages=13, page_size=page_size, on_payload_removed=self.removed.append)
        self.model, self.handles, self.payloads, self.gone = {}, [], {}, []

    def tokens(self, bits, tail):
        """Pages that differ in their last token only, so that they collide in all but that; then a partial page."""
        return [t for bit in bits for t in [0] * (self.page_size - 1) + [bit]] + [0] * (tail % self.page_size)

    def touch(self, namespace, tokens):
        """The pages of the longest cached prefix of `tokens`."""
        self.step += 1
        pages = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            if (entry := self.model.get((namespace, *tokens[:end]))) is None:
                break
            entry[1] = self.step
            pages.append(entry[0])
        return pages

    def locked(self):
        return {key[: 1 + end] for _, key in self.handles for end in range(self.page_size, len(key), self.page_size)}

    def forget(self, count):
        """Page by page: the least recently used prefix that is unlocked and that nothing extends."""
        for gone in range(count):
            inner = self.locked() | {key[: -self.page_size] for key in self.model}
            leaves = [key for key in self.model if key not in inner]
            if not leaves:
                return gone
            oldest = min(leaves, key=lambda key: self.model[key][1])
            del self.model[oldest]
            self.lose(oldest)
        return count

    def lose(self, key):
        if key in self.payloads:
            self.gone.append(self.payloads.pop(key))

    @rule(bits=bits, namespace=namespaces, attach=st.booleans())
    def payload(self, bits, namespace, attach):
        tokens = self.tokens(bits, 0)
        _, num_tokens, node = self.cache.match(tokens, namespace)
        key = (namespace, *tokens[:num_tokens])
        self.touch(namespace, tokens)
        if num_tokens:
            assert node.payload == self.payloads.get(key)
            self.lose(key)
            if attach:
                self.payloads[key] = self.step
                self.cache.attach(node, self.step)
            else:
                self.cache.detach(node)

    @rule(bits=bits, tail=st.integers(0, 3), namespace=namespaces)
    def cut(self, bits, tail, namespace):
        tokens = self.tokens(bits, tail)
        pages = self.touch(namespace, tokens)
        cut = self.cache.cut_to_payload(self.cache.match(tokens, namespace))
        ends = [end for end in range(self.page_size, len(tokens) + 1, self.page_size) if (namespace, *tokens[:end]) in self.payloads]
        assert cut.num_tokens == max(ends, default=0) and list(cut.pages) == pages[: cut.num_tokens // self.page_size]
        assert cut.node.payload == self.payloads.get((namespace, *tokens[: cut.num_tokens]))

    @rule(bits=bits, tail=st.integers(0, 3), namespace=namespaces, reuse=st.booleans())
    def insert(self, bits, tail, namespace, reuse):
        tokens = self.tokens(bits, tail)
        shared = list(self.cache.match(tokens, namespace).pages) if reuse else []
        assert not reuse or shared == self.touch(namespace, tokens)
        if len(bits) - len(shared) > self.allocator.num_free:
            return
        pages = shared + self.allocator.allocate(len(bits) - len(shared))
        cached = self.touch(namespace, tokens)
        node, duplicates = insert(self.cache, tokens, pages, namespace)
        expected = [(i, pages[i], page) for i, page in enumerate(cached) if pages[i] != page]
        assert duplicates == expected and (not reuse or not expected)
        self.allocator.free(duplicate.callers_page for duplicate in duplicates)
        for index in range(len(cached), len(bits)):
            self.model[(namespace, *tokens[: (index + 1) * self.page_size])] = [pages[index], self.step]
        assert node.is_root or self.cache.match(tokens, namespace).node is node

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), bits=bits, tail=st.integers(0, 3))
    def extend(self, data, bits, tail):
        node, (namespace, *prefix) = data.draw(st.sampled_from(self.handles))
        tokens = self.tokens(bits, tail)
        if len(bits) > self.allocator.num_free:
            return
        pages = self.allocator.allocate(len(bits))
        cached = self.touch(namespace, prefix + tokens)[len(prefix) // self.page_size :]
        _, duplicates = self.cache.extend(node, tokens, pages)
        assert duplicates == [(i, pages[i], page) for i, page in enumerate(cached)]
        self.allocator.free(duplicate.callers_page for duplicate in duplicates)
        for index in range(len(cached), len(bits)):
            self.model[(namespace, *prefix, *tokens[: (index + 1) * self.page_size])] = [pages[index], self.step]

    @rule(bits=bits, tail=st.integers(0, 3), namespace=namespaces, lock=st.booleans())
    def match(self, bits, tail, namespace, lock):
        tokens = self.tokens(bits, tail)
        pages, num_tokens, node = self.cache.match(tokens, namespace)
        assert list(pages) == self.touch(namespace, tokens) and num_tokens == len(pages) * self.page_size
        if lock:
            self.cache.lock(node)
            self.handles.append((node, (namespace, *tokens[:num_tokens])))

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def unlock(self, data):
        node, _ = self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1)))
        self.cache.unlock(node)

    @rule(count=st.integers(0, 4))
    def evict(self, count):
        assert self.cache.evict(count) == self.forget(count)

    @rule()
    def clear(self):
        assert self.cache.clear() == self.forget(len(self.model))

    @invariant()
    def agrees(self):
        check_invariants(self.cache)
        assert sorted(self.removed) == sorted(self.gone) and num_payloads(self.cache) == len(self.payloads)
        assert self.cache._owned == {page for page, _ in self.model.values()}
        assert self.locked() <= self.model.keys() and self.cache.locked_pages == len(self.locked())
        assert self.cache.num_pages == len(self.model) == self.cache.locked_pages + self.cache.evictable_pages
        assert self.allocator.num_free == self.allocator.num_usable - len(self.model)

    def teardown(self):
        for node, _ in self.handles:
            self.cache.unlock(node)
        self.cache.clear()
        assert self.allocator.num_free == self.allocator.num_usable
        assert sorted(self.removed) == sorted([*self.gone, *self.payloads.values()]) and num_payloads(self.cache) == 0


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
