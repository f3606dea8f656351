"""Steps brought to the device by the kernel against steps that are copied: the same numbers at the same addresses, and the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.batch import packed_ints
from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, RequestColumns
from paged_attn.attn_ops.batch.packed_ints import IntBuffer, PackedInts, words
from paged_attn.attn_ops.batch.step_buffers import StepBuffers, StepShape
from paged_attn.engine.steps.future_tokens import FutureTokens, future_token

pytest.importorskip("triton")
from paged_attn.backends.host_memory import fetch
from paged_attn.backends.host_memory.fetch import FetchKernel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE_SIZE, ROWS, REQUESTS, PAGES = 4, 40, 9, 12


def both(num_groups: int, tokens: list[int]) -> tuple[StepBuffers, StepBuffers]:
    """Buffers that a step is copied to, and those that the kernel brings it to; garbage in both."""
    made = []
    for brought in (None, FetchKernel(torch.tensor(tokens, device=DEVICE))):
        memory = StepBuffers(ROWS, ROWS, REQUESTS, PAGES, DEVICE, num_groups, brought)
        memory._ints.ints.fill_(-7)
        memory._tables.fill_(33)
        made.append(memory)
    return made[0], made[1]


def columns_of(lengths: list[tuple[int, int]], num_groups: int, unknown: list[int]) -> RequestColumns:
    """Requests of (cached, new) tokens; of those whose index is in `unknown`, the last token is a row of the step before."""
    requests, page = [], 1
    for index, (cached, new) in enumerate(lengths):
        count = -(-(cached + new) // PAGE_SIZE)
        ids = [100 + index] * (new - 1) + [future_token(index) if index in unknown else 5]
        requests.append(BatchRequest(ids, range(page, page + count), cached, 1, index + 1))
        page += count
    columns = RequestColumns.of(requests)
    if num_groups > 1:
        columns.group_tables = np.stack([columns.page_table + 50 * group for group in range(1, num_groups)])
    return columns


def same(copied: Batch, brought: Batch, tokens: list[int]) -> None:
    FutureTokens.resolve(holding(tokens), copied.input_ids)
    assert brought.knows_tokens and not copied.knows_tokens
    for name, value in vars(copied).items():
        if isinstance(value, torch.Tensor):
            found = getattr(brought, name)
            assert found.stride() == value.stride() and torch.equal(found, value), name
    for one, other in zip(copied.groups, brought.groups, strict=True):
        assert torch.equal(one.slots, other.slots) and torch.equal(one.page_table, other.page_table)


def holding(tokens: list[int]) -> FutureTokens:
    future = FutureTokens(len(tokens), DEVICE)
    future.tokens.copy_(torch.tensor(tokens))
    return future


TOKENS = [11, 0, 2**40, 7, 3, 151_000, 8, 9, 10]
DECODES = st.lists(st.integers(1, PAGES * PAGE_SIZE - 1), max_size=REQUESTS).map(lambda cached: [(each, 1) for each in cached])
STEPS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), max_size=REQUESTS)


@pytest.mark.parametrize("block", [16, fetch.BLOCK])
@settings(deadline=None)  # a first launch compiles
@given(lengths=DECODES, more=st.integers(0, 3), num_groups=st.integers(1, 3), unknown=st.lists(st.integers(0, REQUESTS)))
def test_decode_steps(block: int, lengths: Any, more: int, num_groups: int, unknown: list[int]) -> None:
    """In many programs as in one, with dummies, into rows of the tables that keep what is in other columns."""
    size = min(max(len(lengths) + more, 1), REQUESTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "BLOCK", block)
        steps = [
            Batch.build(columns_of(lengths, num_groups, unknown), PAGE_SIZE, shape=StepShape(size, size, size), buffers=buffers)
            for buffers in both(num_groups, TOKENS)
        ]
    same(steps[0], steps[1], TOKENS)


@settings(deadline=None)  # a first launch compiles
@given(lengths=STEPS, num_groups=st.integers(1, 3), unknown=st.lists(st.integers(0, REQUESTS)))
def test_any_steps(lengths: Any, num_groups: int, unknown: list[int]) -> None:
    steps = [
        Batch.build(columns_of(lengths, num_groups, unknown), PAGE_SIZE, shape=StepShape(ROWS, REQUESTS), buffers=buffers)
        for buffers in both(num_groups, TOKENS)
    ]
    same(steps[0], steps[1], TOKENS)


@pytest.mark.parametrize("requests", [None, 4])
def test_a_large_step_is_copied_first(requests: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MOST_BYTES", 8)
    steps = [
        Batch.build(columns_of([(9, 1), (30, 1), (1, 1)], 2, [0, 2]), PAGE_SIZE, shape=StepShape(4, 4, requests), buffers=buffers)
        for buffers in both(2, TOKENS)
    ]
    same(steps[0], steps[1], TOKENS)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_row_without_a_token_gives_token_0(num_requests: int) -> None:
    """Its request ends once the host knows."""
    lengths, shape, tokens = [(9, 1)] * num_requests, StepShape(3, 3, 3), [-1, 6, -2]
    steps = [Batch.build(columns_of(lengths, 1, [0, 1, 2]), PAGE_SIZE, shape=shape, buffers=buffers) for buffers in both(1, tokens)]
    same(steps[0], steps[1], tokens)
    assert steps[1].input_ids.tolist() == ([0, 6, 0] if num_requests == 3 else [0, 0, 0])


@pytest.mark.parametrize("fixed", [False, True])
def test_packed_numbers_are_brought_where_a_kernel_is_there(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    brought: list[int] = []
    monkeypatch.setattr(packed_ints, "FETCH_KERNEL", lambda into, memory: brought.append(len(memory)) or fetch.fetch(into, memory))
    device = torch.device("meta") if not fixed and DEVICE.type == "cpu" else DEVICE  # on the CPU, memory is where it belongs
    packed = PackedInts((3, 2), (5,), device, IntBuffer(words((3, 2), (5,)), DEVICE) if fixed else None)
    for number, field in enumerate(packed.host, start=1):
        field[:] = number
    if device.type == "meta":
        monkeypatch.setattr(fetch, "fetch", lambda into, memory: None)
        assert packed.to_device()[0].device == device
    else:
        assert [field.tolist() for field in packed.to_device()] == [[1] * 3, [2] * 2, [3] * 5]
    assert brought == [len(packed.memory)]


@pytest.mark.parametrize(
    "numbers", [np.arange(3), np.arange(2 * fetch.BLOCK + 7), np.arange(12).reshape(3, 4).T, np.zeros((0, 3), np.int64)]
)
def test_other_numbers_arrive(numbers: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.from_numpy(numbers)
    memory = memory if DEVICE.type == "cpu" else memory.pin_memory()
    into = torch.full_like(memory, 7, device=DEVICE)
    assert fetch.fetch(into, memory) is into and torch.equal(into.cpu(), torch.from_numpy(numbers))
    monkeypatch.setattr(fetch, "MOST_BYTES", 8)
    assert fetch.fetch(into, memory) is (into if memory.nbytes <= 8 else None)
