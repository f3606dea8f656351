"""The FlashInfer backend gives the oracle's numbers, for every feature, mode, layout and stride."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.attention.flashinfer.backend import FlashInferBackend
from tests.backends.agreeing import REFERENCE, agree
from tests.backends.flashinfer.cases import F16, FEATURES, FRESH, LEADING, MODES, make_case, spec_of
from tests.backends.flashinfer.fake_flashinfer import CALLS
from tests.backends.problems import LAYER, LAYOUTS, NAN, STRIDES, bits, close, copy_of, new_output, run


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_in_every_mode(feature, mode, lse, backend):
    case = make_case(MODES[mode], feature, extra_rows=3)
    assert case.batch.mode is mode
    agree(case, backend, lse=lse)


@pytest.mark.parametrize("prefill", ["fa2", "fa3"])
@pytest.mark.parametrize("lengths", [FRESH, MODES[ForwardMode.EXTEND], LEADING], ids=["fresh", "extend", "leading"])
@pytest.mark.parametrize("feature", ["plain", "windowed_softcap", "windowed_sinks", "bidirectional", "gqa_7"])
def test_both_prefill_kernels(feature, lengths, prefill):
    agree(make_case(lengths, feature, extra_rows=1), FlashInferBackend(prefill=prefill), lse=True)
    assert any(prefill in call for call in CALLS)


@pytest.mark.parametrize("lengths", [FRESH, MODES[ForwardMode.EXTEND]], ids=["fresh", "cached"])
def test_a_bidirectional_window_runs_on_fa3(lengths):
    agree(make_case(lengths, "bidirectional", changes={"sliding_window": 3}), FlashInferBackend(prefill="fa3"), lse=True)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_bfloat16(mode, backend):
    agree(make_case(MODES[mode], "windowed_softcap", dtype=torch.bfloat16), backend, lse=True)


@pytest.mark.parametrize("dim", [128, 256])
def test_head_dims(dim, backend):
    agree(make_case(LEADING, changes={"qk_head_dim": dim, "v_head_dim": dim, "scale": 0.05}), backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_layouts(page_size, layout, backend):
    agree(make_case([(66, 1), (65, 3), (70, 1)], page_size=page_size, layout=layout), backend)
    agree(make_case([(66, 1), (65, 1), (100, 1)], page_size=page_size, layout=layout), backend)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("new", [1, 2])
def test_lengths_around_page_edges(page_size, new, backend):
    ends = {edge + d for edge in (page_size, 2 * page_size) for d in (-1, 0, 1)}
    agree(make_case([(end - new, new) for end in sorted(ends) if end > new], page_size=page_size), backend)


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("lengths", [FRESH, *MODES.values()], ids=["fresh", *(m.value for m in MODES)])
def test_odd_strides(strides, lengths, backend):
    agree(make_case(lengths, strides=strides, extra_rows=2), backend)


@pytest.mark.parametrize("prefill", ["fa2", "fa3"])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("lengths", [LEADING, MODES[ForwardMode.DECODE]], ids=["mixed", "decode"])
def test_output_may_have_odd_strides(strides, lengths, prefill):
    case = make_case(lengths, extra_rows=2)
    expected, _ = run(copy_of(case), REFERENCE)
    output = new_output(case, strides)
    with ForwardContext(case.batch, case.pool, FlashInferBackend(prefill=prefill)):
        UNIFIED_ATTENTION(case.query, case.key, case.value, output, LAYER, True)
    close(output, expected, F16)


def test_log_sum_exps_may_have_odd_strides(backend):
    case = make_case(LEADING)
    _, expected = run(copy_of(case), REFERENCE, lse=True)
    lse_out = torch.full((4, case.batch.num_rows), NAN).T
    with ForwardContext(case.batch, case.pool, backend):
        UNIFIED_ATTENTION(case.query, case.key, case.value, new_output(case), LAYER, True, lse_out=lse_out)
    close(lse_out, expected, F16)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.sampled_from([0, 0, 1, 3, 7, 15, 16, 17, 31]), st.sampled_from([1, 1, 1, 2, 5])), min_size=1, max_size=8),
    feature=st.sampled_from(sorted(FEATURES)),
    page_size=st.sampled_from([1, 2, 16, 64]),
    layout=st.sampled_from(LAYOUTS),
    strides=st.sampled_from(STRIDES),
    extra_rows=st.integers(0, 3),
    prefill=st.sampled_from(["auto", "fa3"]),
    lse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch(lengths, feature, page_size, layout, strides, extra_rows, prefill, lse, seed):
    case = make_case(lengths, feature, page_size=page_size, layout=layout, strides=strides, extra_rows=extra_rows, seed=seed)
    agree(case, FlashInferBackend(prefill=prefill), lse=lse)


def test_an_idle_step_gives_zeros_and_stores_nothing(backend):
    case = make_case([(0, 2)])
    case.batch = type(case.batch).build([], case.pool.page_size)
    before = bits(case.pool.storage).clone()
    output, lse = run(case, backend, lse=True)
    assert torch.equal(output, torch.zeros_like(output)) and torch.equal(lse, torch.zeros_like(lse))
    assert torch.equal(bits(case.pool.storage), before) and not CALLS


@pytest.mark.parametrize("lengths", [FRESH, LEADING], ids=["fresh", "mixed"])
def test_a_layer_that_shares_kv_reads_the_pool(lengths, backend):
    case = make_case(lengths)
    first, _ = run(case, REFERENCE)
    pool = KVPool([case.pool.layers[0], case.spec, case.spec], case.pool.num_pages, case.pool.page_size, F16)
    pool.key(LAYER).copy_(case.pool.key(LAYER))
    pool.value(LAYER).copy_(case.pool.value(LAYER))
    case.pool, case.key, case.value = pool, case.key * NAN, case.value * NAN
    output, _ = run(case, backend, save=False, layer=2)
    close(output, first, F16)


def test_a_step_whose_kv_was_stored_otherwise_reads_the_pool(backend):
    """A fused pass may have stored K and V, and what the op gets is then not what is in the pool."""
    case = make_case(FRESH)
    expected, _ = run(case, REFERENCE)
    case.key, case.value = case.key * NAN, case.value * NAN
    output, _ = run(case, backend, save=False)
    close(output, expected, F16)
    assert CALLS == ["paged:fa2"]


def test_layers_of_several_kinds_in_one_step(backend):
    """Layers 0 and 2 differ from layer 1 in window and softcap, and each gets its own numbers from one plan."""
    specs = [spec_of("window", kv_layer=0), spec_of("plain"), spec_of("softcap", kv_layer=2)]
    base = make_case(LEADING)
    pool = KVPool(specs, base.pool.num_pages, base.pool.page_size, F16)
    for layer in range(3):
        pool.key(layer).copy_(base.pool.key(LAYER))
        pool.value(layer).copy_(base.pool.value(LAYER))
    for layer, spec in enumerate(specs):
        case = dataclasses.replace(base, pool=pool, spec=spec)
        expected, _ = run(copy_of(case), REFERENCE, layer=layer)
        close(run(case, backend, layer=layer)[0], expected, F16)
