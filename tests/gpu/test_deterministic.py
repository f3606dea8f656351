"""Backends that declare DETERMINISTIC: a row is bitwise the same whatever else is in the batch.

One request of 331 tokens is run alone, among 3 and among 64 others, in other orders, and in chunks that end at other points; its last
row is compared. Its K and V are in the pool from the start, so that nothing but attention can differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.attention.capabilities import Feature
from paged_attn.backends.selection.registry import backend_class
from tests.backends.fitting import JIT, instance, problem_of, reasons_against, usable_names
from tests.backends.problems import LAYER, NAN, Case, bits, make, spec_of

PAGE_SIZE = 16
WHOLE = (331, *((37 * i) % 290 + 3 for i in range(64)))  # tokens of each request; the first is the one that is looked at
CUDA = torch.device("cuda")
NAMES = [
    pytest.param(name, marks=[pytest.mark.jit] * (name in JIT))
    for name in usable_names("cuda")
    if Feature.DETERMINISTIC in backend_class(name).capabilities.features
]
DETERMINISTIC = frozenset({Feature.DETERMINISTIC})


@pytest.fixture(scope="module", params=["plain", "window", "sinks", "gqa_7"])
def whole(request: pytest.FixtureRequest) -> Case:
    """All requests from their first token on: `query` has a row for each token, and the pool its K and V."""
    case = make([(0, length) for length in WHOLE], spec_of(request.param, dim=64), page_size=PAGE_SIZE, dtype=torch.bfloat16).to(CUDA)
    slots = case.batch.slots
    for pooled, new in ((case.pool.key(LAYER), case.key), (case.pool.value(LAYER), case.value)):
        pooled[slots // PAGE_SIZE, slots % PAGE_SIZE] = new
    return case


def row_of_first(case: Case, name: str, shares: Sequence[tuple[int, int, int]], position: int | None = None) -> Tensor:
    """What the row at `position` (the last of the step) of request 0 gives, as bytes; `shares` holds (request, first, end) in order."""
    table, starts = case.batch.page_table_host, [case.rows(r).start for r in range(len(WHOLE))]
    assert table is not None
    requests = [BatchRequest([1] * (end - first), table[r, : -(-end // PAGE_SIZE)], first) for r, first, end in shares]
    batch = Batch.build(requests, PAGE_SIZE, CUDA)

    def rows_of(whole: Tensor) -> Tensor:
        real = torch.cat([whole[starts[r] + first : starts[r] + end] for r, first, end in shares])
        return torch.cat([real, real.new_full((batch.num_rows - len(real), *real.shape[1:]), NAN)])

    query, key, value = map(rows_of, (case.query, case.key, case.value))
    output = torch.full_like(query, NAN)
    with ForwardContext(batch, case.pool, instance(name, deterministic=True)):
        UNIFIED_ATTENTION(query, key, value, output, LAYER, False, sinks=case.sinks)
    mine = next(i for i, share in enumerate(shares) if share[0] == 0)
    before = sum(end - first for _, first, end in shares[:mine])
    row = output[before + (shares[mine][2] - 1 if position is None else position) - shares[mine][1]]
    assert not row.isnan().any()
    return bits(row)


def skip_unless_it_fits(name: str, case: Case) -> None:
    if reasons := reasons_against(name, problem_of(case, CUDA, extra=DETERMINISTIC)):
        pytest.skip("; ".join(reasons))


def decode(request: int) -> tuple[int, int, int]:
    return request, WHOLE[request] - 1, WHOLE[request]


@pytest.mark.parametrize("name", NAMES)
def test_a_decoding_row(whole: Case, name: str) -> None:
    skip_unless_it_fits(name, whole)
    alone = row_of_first(whole, name, [decode(0)])
    others = [decode(r) for r in range(1, 65)]
    batches = {
        "again": [decode(0)],
        "among 3": [decode(0), *others[:3]],
        "last of 4": [*others[:3], decode(0)],
        "among 64": [*others[:20], decode(0), *others[20:]],
        "among 64 in another order": [*reversed(others[30:]), decode(0), *others[:30]],
        "among the shortest": [decode(0), *sorted(others, key=lambda share: share[2])[:5]],
        "with a prompt": [(1, 0, WHOLE[1]), decode(0), *others[1:4]],
    }
    differ = [what for what, shares in batches.items() if not torch.equal(row_of_first(whole, name, shares), alone)]
    assert not differ


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_a_prompt(whole: Case, name: str) -> None:
    skip_unless_it_fits(name, whole)
    mine, others = (0, 0, WHOLE[0]), [(r, 0, WHOLE[r]) for r in range(1, 65)]
    alone = row_of_first(whole, name, [mine])
    batches = {
        "again": [mine],
        "among 3": [others[0], mine, *others[1:3]],
        "among 64": [*others, mine],
        "among 64 in another order": [mine, *reversed(others)],
        "among decodes": [*(decode(r) for r in range(1, 30)), mine],
        "two chunks": [(0, 160, 331)],
        "cut within a page": [(0, 101, 331)],
        "cut elsewhere, among 3": [*others[:2], (0, 211, 331), others[2]],
        "a short last chunk": [(0, 329, 331), others[4]],
        "a last chunk of one token, among prompts": [others[3], (0, 330, 331)],
        "a last chunk of one token, as a decode": [(0, 330, 331)],
    }
    differ = [what for what, shares in batches.items() if not torch.equal(row_of_first(whole, name, shares), alone)]
    assert not differ


@pytest.mark.parametrize("name", NAMES)
def test_a_row_in_the_middle_of_a_prompt(whole: Case, name: str) -> None:
    skip_unless_it_fits(name, whole)
    alone = row_of_first(whole, name, [(0, 0, 331)], position=150)
    for first, end in ((0, 151), (0, 200), (100, 300), (149, 152)):
        assert torch.equal(row_of_first(whole, name, [(0, first, end), (5, 0, WHOLE[5])], position=150), alone), (first, end)


def test_the_comparison_sees_a_row_of_another_query(whole: Case) -> None:
    """Negative control, and the case itself: the oracle gives the same row in any batch, and another for another position."""
    alone = row_of_first(whole, "reference", [decode(0)])
    assert torch.equal(row_of_first(whole, "reference", [(1, 0, 5), (0, 300, 331)]), alone)
    assert not torch.equal(row_of_first(whole, "reference", [(0, 300, 330)]), alone)


def test_there_is_a_deterministic_backend() -> None:
    assert {str(parameter.values[0]) for parameter in NAMES} >= {"triton"}
