"""RadixCache.peek: what match would find, without leaving a trace; and how many tokens are the same."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.engine.memory.radix_cache import RadixCache
from paged_attn.engine.memory.radix_node import num_common


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_it_says_what_match_finds(seed: int) -> None:
    rng = random.Random(seed)
    allocator = PageAllocator(200, rng.choice([1, 2, 3]))
    tree = RadixCache(allocator)

    def tokens() -> list[int]:
        return [rng.choice([1, 2]) for _ in range(rng.randint(0, 14))]

    for _ in range(rng.randint(0, 8)):
        inserted, namespace = tokens(), rng.choice([None, "a"])
        pages = allocator.allocate(allocator.pages_for(len(inserted)))
        result = tree.extend(tree.match([], namespace).node, inserted, pages)
        allocator.free([d.callers_page for d in result.duplicates] + pages[len(inserted) // allocator.page_size :])
        if result.node.parent is not None and rng.random() < 0.5:
            tree.attach(result.node, "state")
    tree.evict(rng.choice([0, 0, 1, 3]))
    for _ in range(10):
        asked, namespace = tokens(), rng.choice([None, "a", "b"])
        limit = rng.choice([None, rng.randint(0, 14)])
        pages, with_payload = tree.peek(asked, namespace, limit)
        match = tree.match(asked[:limit], namespace)
        assert tuple(pages) == match.pages
        assert with_payload[-1:] == [count for count in [len(tree.cut_to_payload(match).pages)] if count]


def test_it_neither_splits_nodes_nor_marks_them_as_used() -> None:
    allocator = PageAllocator(10, 2)
    tree = RadixCache(allocator)
    for first in (1, 2):
        tree.extend(tree.match([]).node, [first] * 6, allocator.allocate(3))
    nodes = [tree.match([first] * 6).node for first in (1, 2)]
    assert [len(tree.peek(asked)[0]) for asked in ([1] * 4 + [3] * 2, [1] * 5, [3] * 6)] == [2, 2, 0]
    assert len(nodes[0].pages) == 3 and nodes[0].last_access < nodes[1].last_access
    tree.evict(3)
    assert nodes[0].is_evicted, "it is still the least recently used"


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.integers(0, 30), st.integers(0, 3))
def test_the_common_length_is_that_of_a_loop(a: list[int], b: list[int], shared: int, shift: int) -> None:
    a, b = [7] * shared + a, [7] * shared + b
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert num_common(a, b, shared) == expected == num_common(a, b)
    assert num_common(a, [9] * shift + b, shift=shift) == expected
