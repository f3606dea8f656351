"""XQA decode through FlashInfer, against the oracle and with a stand-in for FlashInfer (see `fake_flashinfer`)."""

import dataclasses
import logging
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.batch.batch import Batch, ForwardMode
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.capabilities import Feature, Problem, unmet
from paged_attn.backends.attention.flashinfer import trtllm, wrappers
from paged_attn.backends.attention.flashinfer.trtllm import TrtllmMhaBackend
from tests.backends.agreeing import REFERENCE, agree
from tests.backends.flashinfer import fake_flashinfer
from tests.backends.flashinfer.cases import F16
from tests.backends.flashinfer.fake_flashinfer import CALLS
from tests.backends.problems import LAYER, LAYOUTS, NAN, STRIDES, close, copy_of, make, new_output, run

FEATURES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window_1": {"sliding_window": 1},
    "sinks": {"has_sinks": True},
    "windowed_sinks": {"sliding_window": 17, "has_sinks": True},
    "mha": {"num_kv_heads": 4},
    "gqa_7_sinks": {"num_q_heads": 14, "has_sinks": True},
}
LENGTHS = [(1, 1), (15, 1), (16, 1), (47, 1)]


def spec_of(feature="plain", **changes):
    defaults = {"num_q_heads": 4, "num_kv_heads": 2, "qk_head_dim": 64, "v_head_dim": 64, "scale": 0.17, "kv_layer": LAYER}
    return AttentionSpec(**{**defaults, **FEATURES[feature], **changes})


def make_case(lengths, feature="plain", *, changes=None, dtype=F16, page_size=16, **options):
    return make(lengths, spec_of(feature, **(changes or {})), dtype=dtype, page_size=page_size, **options)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(wrappers, "MIN_WORKSPACE", 0)
    monkeypatch.setattr(trtllm, "WORKSPACE", 16 << 20)
    return fake_flashinfer.install(monkeypatch)


@pytest.fixture
def backend():
    return TrtllmMhaBackend()


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(feature, backend):
    case = make_case(LENGTHS, feature, extra_rows=3)
    assert case.batch.mode is ForwardMode.DECODE
    agree(case, backend)
    assert CALLS == ["xqa"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_page_layouts(page_size, layout, backend):
    agree(make_case([(130, 1), (129, 1), (160, 1)], page_size=page_size, layout=layout), backend)


@pytest.mark.parametrize("dim", [128, 256])
def test_head_dims_and_bfloat16(dim, backend):
    changes = {"qk_head_dim": dim, "v_head_dim": dim, "scale": 0.05}
    agree(make_case(LENGTHS, "windowed_sinks", changes=changes, dtype=torch.bfloat16), backend)


@pytest.mark.parametrize("strides", STRIDES)
def test_odd_strides(strides, backend):
    agree(make_case(LENGTHS, strides=strides, extra_rows=2), backend)


@pytest.mark.parametrize("strides", STRIDES)
def test_output_may_have_odd_strides(strides, backend):
    case = make_case(LENGTHS, extra_rows=2)
    expected, _ = run(copy_of(case), REFERENCE)
    output = new_output(case, strides)
    with ForwardContext(case.batch, case.pool, backend):
        UNIFIED_ATTENTION(case.query, case.key, case.value, output, LAYER, True)
    close(output, expected, F16)


def test_a_page_table_within_a_wider_one(backend):
    case = make_case(LENGTHS)
    wide = torch.cat([case.batch.page_table, torch.zeros_like(case.batch.page_table)], dim=1)
    case.batch = dataclasses.replace(case.batch, page_table=wide[:, : case.batch.page_table.shape[1]])
    agree(case, backend)


def test_a_layer_that_shares_kv_reads_the_pool(backend):
    case = make_case(LENGTHS)
    first, _ = run(case, REFERENCE)
    pool = KVPool([case.pool.layers[0], case.spec, case.spec], case.pool.num_pages, 16, F16)
    pool.key(LAYER).copy_(case.pool.key(LAYER))
    pool.value(LAYER).copy_(case.pool.value(LAYER))
    case.pool, case.key, case.value = pool, case.key * NAN, case.value * NAN
    close(run(case, backend, save=False, layer=2)[0], first, F16)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cached=st.lists(st.sampled_from([1, 3, 7, 15, 16, 17, 31, 32, 63]), min_size=1, max_size=6),
    feature=st.sampled_from(sorted(FEATURES)),
    page_size=st.sampled_from([16, 32]),
    layout=st.sampled_from(LAYOUTS),
    strides=st.sampled_from(STRIDES),
    extra_rows=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_any_batch(cached, feature, page_size, layout, strides, extra_rows, seed):
    lengths = [(count, 1) for count in cached]
    case = make_case(lengths, feature, page_size=page_size, layout=layout, strides=strides, extra_rows=extra_rows, seed=seed)
    agree(case, TrtllmMhaBackend())


def test_the_semaphores_of_a_backend_are_zeroed_once(backend):
    case = make_case(LENGTHS)
    first, second = (backend.plan(case.batch, case.pool).workspace for _ in range(2))
    assert first is second and first.numel() == trtllm.WORKSPACE == 16 << 20


@pytest.mark.parametrize("lengths", [[(0, 3)], [(4, 1), (0, 3)], [(0, 1)]], ids=["extend", "mixed", "prompt of one"])
def test_what_is_not_decode_is_sent_to_a_hybrid(lengths, backend):
    with pytest.raises(UnsupportedError, match=r"decode kernels only .*use backend='fa3,trtllm_mha'"):
        run(make_case(lengths), backend)


def test_an_idle_step_runs(backend):
    case = make_case([(3, 1)])
    case.batch = Batch.build([], 16)
    output, _ = run(case, backend)
    assert torch.equal(output, torch.zeros_like(output)) and not CALLS


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"softcap": 2.0}, "no softcap"), ({"chunk": 6}, "no chunk"), ({"alibi_slopes": (0.5, 0.25, 0.1, 0.1)}, "no ALiBi"),
     ({"bias_index": "key"}, "no biases")],
)  # fmt: skip
def test_nothing_is_dropped_silently(changes, words, backend):
    with pytest.raises(UnsupportedError, match=f"{words}; take another backend"):
        run(make_case(LENGTHS, changes=changes), backend)


def test_it_gives_no_log_sum_exp_and_takes_no_other_dtype(backend):
    with pytest.raises(UnsupportedError, match="no log-sum-exp"):
        run(make_case(LENGTHS), backend, lse=True)
    case = make_case(LENGTHS)
    case.query = case.query.bfloat16()
    with pytest.raises(UnsupportedError, match=r"no queries of torch\.bfloat16 for a KV pool of torch\.float16"):
        run(case, backend)


def test_a_pool_whose_page_stride_is_not_in_whole_heads(backend):
    """The kernel divides strides by the head dim and would read elsewhere; 16 tokens of 64 make whole heads of 256."""
    batch, small, large = make_case(LENGTHS).batch, spec_of(kv_layer=0), spec_of(qk_head_dim=256, v_head_dim=256)
    backend.plan(batch, KVPool([small, large], 8, 16, F16))
    odd = dataclasses.replace(small, qk_head_dim=24, v_head_dim=24)
    with pytest.raises(UnsupportedError, match="in whole heads of 24; layer 0 has"):
        backend.plan(batch, KVPool([odd, dataclasses.replace(large, num_kv_heads=1)], 8, 4, F16))


def test_other_gpus_are_refused(backend, monkeypatch):
    monkeypatch.setattr(trtllm, "architecture_of", lambda device: 100)
    case = make_case(LENGTHS)
    with pytest.raises(UnsupportedError, match="runs on SM90; got SM100: not tested on SM100 by this project"):
        backend.plan(case.batch, case.pool)


def test_capabilities():
    def reasons(architecture=90, page_size=16, phases=frozenset({"decode"}), **changes):
        problem = Problem(spec_of(**changes), torch.bfloat16, torch.bfloat16, page_size, "cuda", architecture, phases=phases)
        return unmet(TrtllmMhaBackend.capabilities, problem)

    assert not reasons() and not reasons(sliding_window=9, has_sinks=True) and not reasons(page_size=128)
    assert reasons(100) == ["needs SM90, this GPU is SM100"]
    assert reasons(phases=frozenset({"extend", "decode"})) == ["serves decode, not extend"]
    assert reasons(page_size=1) == ["page size 1 is not in 16, 32, 64, 128"] and reasons(page_size=48)
    assert reasons(softcap=2.0) == ["no softcap"] and reasons(gives_lse=True)
    assert Feature.SOFTCAP not in TrtllmMhaBackend.capabilities.features
    assert "not tested by this project" in TrtllmMhaBackend.capabilities.note


def test_a_log_line_before_what_may_compile(backend, caplog):
    wrappers._announced.clear()
    with caplog.at_level(logging.INFO, "paged_attn"):
        for _ in range(2):
            agree(make_case(LENGTHS, "window"), backend)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, "layers 0 and 1 are alike, layer 2 has another group size"
    assert "XQA kernel for head dim 64, group 2, page size 16, float16, window;" in lines[0]


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match=r"'trtllm_mha' needs flashinfer 0\.6\.8 .*pip install .*\[flashinfer\]'"):
        TrtllmMhaBackend()


def test_deterministic_is_refused():
    with pytest.raises(UnsupportedError, match="not batch-invariant"):
        TrtllmMhaBackend(deterministic=True)
