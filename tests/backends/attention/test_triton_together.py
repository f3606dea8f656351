"""Decode steps whose tiles have several requests, in Triton's interpreter against the float32 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.agreeing import agree
from tests.backends.problems import LAYOUTS, make, run, spec_of

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
if not torch.cuda.is_available():
    from paged_attn.backends.attention.triton import tiling
    from paged_attn.backends.attention.triton.backend import TritonBackend
    from paged_attn.backends.attention.triton.work_partition import segments

    TRITON = TritonBackend()

LENGTHS = [(70, 1), (64, 1), (95, 1), (64, 1), (67, 1)]
FEATURES = ["plain", "softcap", "sinks", "unequal_dims", "wider_v", "mha", "gqa_7_sinks"]


@pytest.fixture(autouse=True)
def from_two_on(monkeypatch):
    monkeypatch.setattr(tiling, "TOGETHER", 2)


def kinds(case):
    return [shares.kind.rows for shares in TRITON.plan(case.batch, case.pool).shares]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(feature, layout):
    case = make(LENGTHS, spec_of(feature), page_size=4, layout=layout, extra_rows=3)
    assert "together" in kinds(case)
    agree(case, TRITON, lse=True, save=True)


@pytest.mark.parametrize("feature", ["plain", "softcap", "gqa_7_sinks"])
def test_decodes_before_prompts(feature):
    case = make([*LENGTHS, (64, 9), (0, 30), (70, 3)], spec_of(feature), page_size=4, layout="shared", extra_rows=3)
    assert {"together", "more"} <= set(kinds(case))
    agree(case, TRITON, lse=True)


def test_a_decode_behind_a_prompt_is_computed_once():
    case = make([(70, 1), (64, 1), (64, 9), (95, 1)], page_size=4, layout="shared")
    assert {"one", "more"} == set(kinds(case))
    agree(case, TRITON, lse=True)


@pytest.mark.parametrize("feature", ["window", "chunk", "alibi", "bias_by_key", "bidirectional"])
def test_what_it_is_not_written_for_goes_the_other_way(feature):
    case = make(LENGTHS, spec_of(feature), page_size=4, layout="shared")
    assert "together" not in [
        TRITON.plan(case.batch, case.pool).shares[i].kind.rows for i in TRITON.plan(case.batch, case.pool).by_layer[1]["intra"]
    ]
    agree(case, TRITON, lse=True, save=True)


@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=2, max_size=9),
    page_size=st.sampled_from([1, 3, 16]),
    layout=st.sampled_from(LAYOUTS),
    heads=st.sampled_from([(4, 2), (3, 3), (8, 1), (6, 2)]),
    prefixes=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 30)), max_size=6),
)
def test_any_batch(lengths, page_size, layout, heads, prefixes):
    """`prefixes`: some requests begin with so many pages of the one before them."""
    spec = replace(spec_of(), num_q_heads=heads[0], num_kv_heads=heads[1])
    case = make([(each, 1) for each in lengths], spec, page_size=page_size, layout=layout)
    for request, pages in prefixes:
        if 0 < request < len(lengths):
            pages = min(pages, *(lengths[each] // page_size for each in (request, request - 1)))
            case.batch.page_table[request, :pages] = case.batch.page_table[request - 1, :pages]
    agree(case, TRITON, lse=True, save=True)


def ends_of(case):
    """What the planning kernel wrote: rows of `ends`, and the units of each request."""
    plan = TRITON.plan(case.batch, case.pool)
    TRITON.plan_in_graph(plan)
    shares = next(each for each in plan.shares if each.kind.rows == "together")
    count = case.batch.num_requests
    return shares.ends[: count * segments(shares.kind)].view(count, -1).tolist(), shares.units[:count].tolist()


def test_shared_blocks_are_read_once():
    ends, units = ends_of(make([(200, 1)] * 4, page_size=4, layout="shared"))
    assert ends[0][:5] == [12, 13, 14, 15, 16] and ends[0][-1] == 4 and units == [16, 0, 0, 0]


def test_requests_that_share_nothing_are_items_of_their_own():
    ends, units = ends_of(make([(40, 1), (70, 1), (16, 1)], page_size=4))
    assert [row[:2] + row[-1:] for row in ends] == [[0, 3, 1], [0, 5, 1], [0, 2, 1]] and units == [3, 5, 2]


def test_an_item_ends_where_what_is_shared_does():
    """Two that share, three of another prefix, padding; each group is read once, though no tile ends between them."""
    case = make([(70, 1), (64, 1), (95, 1), (64, 1), (80, 1), (0, 1), (0, 1)], spec_of("mha"), page_size=4)
    for mine, theirs in ((1, 0), (3, 2), (4, 2)):
        case.batch.page_table[mine, :12] = case.batch.page_table[theirs, :12]
    ends, units = ends_of(case)
    assert units == [3 + 2 + 2, 0, 3 + 3 + 2 + 3, 0, 0, 1, 1]
    assert [ends[i][-1] for i in (0, 2, 5, 6)] == [2, 3, 1, 1] and ends[2][:4] == [3, 6, 8, 11]
    agree(case, TRITON, lse=True)
    stored, _ = run(case, TRITON)
    torch.testing.assert_close(run(case, TRITON, save=False)[0], stored)
