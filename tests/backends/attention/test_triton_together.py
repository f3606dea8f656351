"""Decode steps whose tiles have several requests, in Triton's interpreter against the float32 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.batch.batch import ForwardMode
from tests.backends.agreeing import agree
from tests.backends.problems import LAYOUTS, make, run, spec_of

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
if not torch.cuda.is_available():
    from paged_attn.backends.attention.triton import tiling
    from paged_attn.backends.attention.triton.backend import TritonBackend

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
)
def test_any_batch(lengths, page_size, layout, heads):
    spec = spec_of()

    case = make(
        [(each, 1) for each in lengths], replace(spec, num_q_heads=heads[0], num_kv_heads=heads[1]), page_size=page_size, layout=layout
    )
    agree(case, TRITON, lse=True, save=True)


def test_padding_takes_part_in_what_others_share():
    """Requests of one token, among them and behind them."""
    case = make([(70, 1), (64, 1), (0, 1), (95, 1), (64, 1), (0, 1), (0, 1)], spec_of("mha"), page_size=4, layout="shared")
    case.batch = replace(case.batch, mode=ForwardMode.DECODE)
    plan = TRITON.plan(case.batch, case.pool)
    TRITON.plan_in_graph(plan)
    shares = next(each for each in plan.shares if each.kind.rows == "together")
    assert shares.ends[0] > 0 and shares.units[:7].count_nonzero() == 1
    agree(case, TRITON, lse=True)
    stored, _ = run(case, TRITON)
    torch.testing.assert_close(run(case, TRITON, save=False)[0], stored)


def test_shared_blocks_are_read_once():
    case = make([(200, 1)] * 4, page_size=4, layout="shared")
    plan = TRITON.plan(case.batch, case.pool)
    TRITON.plan_in_graph(plan)
    shares = next(each for each in plan.shares if each.kind.rows == "together")
    assert shares.ends.view(-1, 8 if shares.kind.members > 3 else 4)[0].tolist()[:5] == [12, 13, 14, 15, 16]
