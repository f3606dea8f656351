"""The page allocator: order, all-or-nothing, and every refused call."""

import pickle

import pytest

from paged_attn.attn_ops.kv.page_allocator import OutOfPages, PageAllocator


def test_fresh_pages_come_in_order_and_never_page_zero():
    allocator = PageAllocator(num_pages=5, page_size=4)
    assert (allocator.num_usable, allocator.num_free) == (4, 4)
    assert allocator.allocate(3) == [1, 2, 3]
    assert allocator.allocate(1) == [4]
    assert allocator.num_free == 0
    assert not allocator.is_allocated(0)


def test_allocating_nothing_gives_nothing():
    allocator = PageAllocator(3, 1)
    assert allocator.allocate(0) == []
    assert allocator.num_free == 2


def test_freed_pages_are_reused_first():
    allocator = PageAllocator(10, 1)
    pages = allocator.allocate(4)
    allocator.free(pages[1:3])
    assert not allocator.is_allocated(2) and allocator.is_allocated(1)
    assert allocator.allocate(3) == [2, 3, 5]


def test_free_takes_any_iterable():
    allocator = PageAllocator(4, 1)
    allocator.free(page for page in allocator.allocate(3))
    assert allocator.num_free == 3


def test_running_out_hands_out_nothing():
    allocator = PageAllocator(4, 1)
    allocator.allocate(1)
    with pytest.raises(OutOfPages, match="needed 3 KV pages, but only 2 are free") as caught:
        allocator.allocate(3)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert allocator.num_free == 2
    assert len(allocator.allocate(2)) == 2


def test_out_of_pages_survives_pickling():
    copy = pickle.loads(pickle.dumps(OutOfPages(3, 2)))
    assert (copy.needed, copy.free, str(copy)) == (3, 2, str(OutOfPages(3, 2)))


@pytest.mark.parametrize(
    ("freed", "message"),
    [
        ([1, 3], "double free of page 3: it is not allocated"),
        ([2, 1, 2], "double free of page 2: it is listed twice"),
        ([1, 0], "cannot free page 0"),
        ([1, 6], "page 6 is out of range: this pool has pages 0 to 5"),
        ([1, -4], "page -4 is out of range"),
    ],
)
def test_a_refused_free_changes_nothing(freed, message):
    allocator = PageAllocator(6, 1)
    allocator.allocate(2)
    with pytest.raises(ValueError, match=message):
        allocator.free(freed)
    assert allocator.num_free == 3
    assert allocator.is_allocated(1) and allocator.is_allocated(2)


def test_a_second_free_names_the_page():
    allocator = PageAllocator(6, 1)
    allocator.free(allocator.allocate(2))
    with pytest.raises(ValueError, match="double free of page 2"):
        allocator.free([2])


@pytest.mark.parametrize("page", [-1, 6])
def test_is_allocated_refuses_foreign_pages(page):
    with pytest.raises(ValueError, match=f"page {page} is out of range"):
        PageAllocator(6, 1).is_allocated(page)


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10)])
def test_pages_for_rounds_up(num_tokens, pages):
    assert PageAllocator(2, 16).pages_for(num_tokens) == pages


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="num_pages is 1"):
        PageAllocator(1, 16)
    with pytest.raises(ValueError, match="page_size is 0"):
        PageAllocator(2, 0)
    with pytest.raises(ValueError, match="num_tokens is -1"):
        PageAllocator(2, 16).pages_for(-1)
    with pytest.raises(ValueError, match="asked to allocate -1 pages"):
        PageAllocator(2, 16).allocate(-1)
