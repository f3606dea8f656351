"""Random histories of a table agree with plain tensors, hold no page too many, and let go of all of them."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn import AttentionSpec
from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.hf.shared_pages import CacheFull, SharedPages
from paged_attn.hf.shared_table import SharedTable

LAYERS = (AttentionSpec(2, 2, 3, 5, 1.0), AttentionSpec(1, 1, 4, 4, 1.0, kv_layer=1))
SIZE = 4


def _pages(num_pages: int | None = None) -> SharedPages:
    pages = SharedPages.of_layers(LAYERS, SIZE, torch.float32, torch.device("cpu"), num_pages)
    pages.pool.storage.fill_(float("nan"))
    return pages


def _append(table: SharedTable, past: list, new: int, rows: int, equal: bool = False) -> list:
    """Writes random K and V for all layers and returns what the table should hold."""
    start = past[0].shape[2] if past else 0
    fresh = [torch.randn(1 if equal else rows, s.num_kv_heads, new, d).expand(rows, -1, -1, -1)
             for s in LAYERS for d in (s.qk_head_dim, s.v_head_dim)]  # fmt: skip
    for layer in range(len(LAYERS)):
        table.prepare(rows, start, start + new)
        table.write(layer, start, *fresh[2 * layer : 2 * layer + 2])
    return [torch.cat(pair, 2) for pair in zip(past, fresh, strict=True)] if past else fresh


def _check(table: SharedTable, past: list) -> None:
    length = past[0].shape[2]
    if length:
        held = [t for layer in range(len(LAYERS)) for t in table.gather(layer, table.kept_from, length)]
        for got, want in zip(held, past, strict=True):
            assert got.is_contiguous()
            assert torch.equal(got, want[:, :, table.kept_from :])


STEP = st.tuples(st.sampled_from(["append", "append", "select", "crop", "fork", "drop", "use"]), st.integers(0, 2**16))


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=25), st.integers(1, 4), st.sampled_from([None, 1, 6]), st.booleans())
def test_a_table_holds_what_was_written(steps: list, rows: int, window: int | None, equal: bool) -> None:
    pages, numbers = _pages(), torch.Generator().manual_seed(0)
    first = SharedTable(pages, window)
    caches = [(first, _append(first, [], 9, rows, equal))]
    for name, number in steps:
        table, past = caches[-1]
        length, rows = past[0].shape[2], past[0].shape[0]
        if name == "append":
            past = _append(table, past, 1 + number % 6, rows, equal)
        elif name == "select":
            index = torch.randint(rows, (1 + number % 4,), generator=numbers)
            table.select(index.numpy())
            past = [t[index] for t in past]
        elif name == "crop" and length > 1:
            cut = 1 + number % (length - 1)
            if window is None or max(cut - window + 1, 0) >= table.kept_from:
                table.truncate(cut)
                past = [t[:, :, :cut] for t in past]
        elif name == "fork":
            caches.append((copy.deepcopy(table), past))
            continue
        elif name == "drop" and len(caches) > 1:
            caches.pop(number % len(caches))[0].clear()
            continue
        elif name == "use":
            caches.insert(0, caches.pop())
            continue
        caches[-1] = (table, past)
        for held_by, written in caches:
            _check(held_by, written)
    held = np.unique(np.concatenate([t.held for t, _ in caches]))
    assert pages.num_used == len(held)
    for t, _ in caches:
        t.clear()
    assert pages.num_used == 0


def test_a_write_copies_only_what_others_hold() -> None:
    pages = _pages(num_pages=6)
    table = SharedTable(pages, None)
    past = _append(table, [], 10, 1)
    table.select(np.zeros(3, np.int64))
    assert pages.num_used == 3
    past = _append(table, [t.expand(3, -1, -1, -1) for t in past], 1, 3)
    assert pages.num_used == 5  # two full pages for all, and of the third the last holder keeps the original
    _check(table, past)


def test_rows_that_begin_alike_share_full_pages() -> None:
    pages = _pages()
    table = SharedTable(pages, None)
    past = _append(table, [], 10, 3, equal=True)
    assert pages.num_used == 9
    past = _append(table, past, 1, 3)
    assert pages.num_used == 2 + 3
    _check(table, past)
    other = SharedTable(pages, None)
    _append(other, _append(other, [], 10, 3), 1, 3)
    assert pages.num_used == 5 + 9


def test_a_full_pool_says_so_and_changes_nothing() -> None:
    pages = _pages(num_pages=6)
    table = SharedTable(pages, None)
    past = _append(table, [], 8, 2)
    with pytest.raises(CacheFull, match=r"needed 2 more KV pages, but only 1 of this.*more num_pages, or none"):
        table.prepare(2, 8, 9)
    _check(table, past)
    assert (pages.num_used, pages.pool.num_pages) == (4, 6)


def test_a_pool_that_grows_keeps_pages_and_holders() -> None:
    pages = _pages()
    table = SharedTable(pages, None)
    past = _append(table, [], 6, 1)
    table.select(np.zeros(2, np.int64))
    table.select(np.array([1]))
    past = _append(table, past, 40, 1)
    assert pages.pool.num_pages > 12
    _check(table, past)
    table.clear()
    assert pages.num_used == 0


def test_a_fork_in_the_middle_of_a_step_is_not_written_into() -> None:
    pages = _pages()
    table = SharedTable(pages, None)
    table.prepare(1, 0, 3)
    fork = copy.deepcopy(table)
    table.prepare(1, 0, 3)
    assert not set(table.held) & set(fork.held)


def test_a_pickled_table_goes_on_by_itself() -> None:
    table = SharedTable(_pages(), None)
    past = _append(table, [], 9, 2)
    other = pickle.loads(pickle.dumps(table))
    assert other.pages.pool.key(1).untyped_storage().data_ptr() == other.pages.pool.storage.untyped_storage().data_ptr()
    more = _append(other, past, 30, 2)  # grows
    _check(other, more)
    _check(table, past)
    before = other.pages.num_used
    del other
    assert table.pages.num_used == 2 * -(-9 // SIZE) < before


def test_tables_of_several_threads_share_a_pool_that_grows() -> None:
    pages, wrong = _pages(), list[Exception]()

    def work(rows: int) -> None:
        try:
            for _ in range(20):
                table, past = SharedTable(pages, None), list[torch.Tensor]()
                for new in (7, 1, 13, 30):
                    past = _append(table, past, new, rows)
                    _check(table, past)
                table.select(np.arange(rows)[::-1].copy())
                _check(table, [each.flip(0) for each in past])
        except (AssertionError, IndexError, ValueError, RuntimeError) as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not pages.num_used


WAYS: dict[str, Callable[[SharedTable], object]] = {
    "prepare": lambda table: table.prepare(2, 6, 15), "select": lambda table: table.select(np.array([1, 1, 0])),
    "truncate": lambda table: table.truncate(1), "clear": lambda table: table.clear(),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_loses_no_page(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Ctrl-C when pages were handed out or taken back, and the table does not know yet: it is raised when it does."""
    pages = _pages(40)
    table = SharedTable(pages, None)
    past = _append(table, [], 6, 2)
    shared = copy.deepcopy(table)
    name = "allocate" if way == "prepare" else "free"
    function, calls = getattr(PageAllocator, name), iter(range(9))

    def interrupting(*args: Any) -> Any:
        result = function(*args)
        if next(calls) == 0:
            signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(PageAllocator, name, interrupting)
        with pytest.raises(KeyboardInterrupt):
            WAYS[way](table)
    _check(shared, past)
    assert pages.num_used == len({*table.held.tolist(), *shared.held.tolist()})
    table.clear()
    shared.clear()
    assert pages.num_used == 0
