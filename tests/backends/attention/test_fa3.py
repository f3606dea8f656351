"""fa3 against the float32 oracle, through an op with the schema of sglang-kernel 0.4.2.post2 that computes in plain PyTorch.

See `fake_fa3` for what it checks.
"""

import dataclasses
import importlib.util
import sys
import types
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.capabilities import Feature, Problem, unmet
from paged_attn.backends.attention.fa3 import FA3Backend
from paged_attn.backends.attention.reference import ReferenceBackend
from tests.backends import fake_fa3
from tests.backends.agreeing import agree as agree_with_oracle
from tests.backends.problems import FEATURES, LAYER, LAYOUTS, STRIDES, bits, close, copy_of, make, new_output, run, spec_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sgl_kernel") is not None, reason="the real sgl_kernel is installed: see tests/gpu"
)

REFERENCE = ReferenceBackend()
BF16 = torch.bfloat16
DECLARED = sorted(name for name in FEATURES if not unmet(FA3Backend.capabilities, Problem(spec_of(name), BF16, BF16, 16, "cuda", 90)))
MODES = {
    ForwardMode.EXTEND: [(0, 7), (0, 1), (0, 18), (9, 4)],
    ForwardMode.DECODE: [(1, 1), (15, 1), (16, 1), (30, 1)],
    ForwardMode.MIXED: [(17, 1), (0, 1), (6, 5), (33, 1), (0, 9)],
}


@pytest.fixture(scope="module")
def fa3():
    with fake_fa3.installed() as op:
        yield types.SimpleNamespace(normal=FA3Backend(), op=op)


def agree(case, backend, *, lse=False, save=True):
    agree_with_oracle(case, backend, lse=lse, save=save, lse_tolerance=2e-3)


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("feature", DECLARED)
def test_every_declared_feature_in_every_mode(fa3, feature, mode, lse):
    case = make(MODES[mode], spec_of(feature), page_size=4, extra_rows=3, dtype=BF16)
    assert case.batch.mode is mode
    agree(case, fa3.normal, lse=lse)


def test_the_features_of_the_problems_that_it_declares():
    assert set(FEATURES) - set(DECLARED) == {
        "bias_by_distance", "bias_by_key", "windowed_bias", "alibi", "unequal_dims", "wider_v", "all", "window_chunk",
    }  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("feature", ["plain", "window", "sinks"])
def test_float16(fa3, feature, mode):
    agree(make(MODES[mode], spec_of(feature), page_size=4, dtype=torch.float16), fa3.normal, lse=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_page_layouts(fa3, page_size, layout):
    lengths = [(130, 1), (140, 3), (129, 100)] if layout == "shared" else [(130, 1), (0, 100), (6, 5), (33, 1)]
    agree(make(lengths, page_size=page_size, layout=layout, dtype=BF16), fa3.normal)


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("feature", ["plain", "window", "bidirectional"])
def test_unused_slots_of_large_pages_are_not_read(fa3, feature, page_size):
    """TMA would read them: 200 queries of two heads fill a tile."""
    spec = dataclasses.replace(spec_of(feature), qk_head_dim=256, v_head_dim=256, num_q_heads=2, num_kv_heads=1)
    agree(make([(0, 200), (3, 1)], spec, page_size=page_size, dtype=BF16), fa3.normal)
    assert not fa3.op.kernels[-1][3]


def test_the_fake_spoils_what_tma_would_spoil(fa3, monkeypatch):
    """Negative control for the test above."""
    monkeypatch.setattr("paged_attn.backends.attention.fa3.SMALLEST_KEY_BLOCK", 1 << 30)
    output, _ = run(make([(0, 200), (3, 1)], page_size=128, dtype=BF16), fa3.normal)
    assert fa3.op.kernels[-1][3] and output.isnan().any()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("new", [1, 2])
def test_lengths_around_page_edges(fa3, page_size, new):
    ends = {edge + d for edge in (page_size, 2 * page_size) for d in (-1, 0, 1)}
    agree(make([(end - new, new) for end in sorted(ends) if end >= new], page_size=page_size, dtype=BF16), fa3.normal)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.MIXED], ids=lambda m: m.value)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("feature", ["plain", "sinks"])
def test_odd_strides_of_the_inputs(fa3, strides, feature, mode):
    agree(make(MODES[mode], spec_of(feature), page_size=4, strides=strides, extra_rows=2, dtype=BF16), fa3.normal)


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_odd_strides_of_the_output(fa3, strides, dtype, lse):
    case = make(MODES[ForwardMode.MIXED], spec_of("sinks"), page_size=4, extra_rows=2, dtype=dtype)
    expected, expected_lse = run(copy_of(case), REFERENCE, lse=True)
    output, lse_out = (
        new_output(case, strides),
        torch.full((2, *case.query.shape[:2]), float("nan")).permute(1, 2, 0)[..., 0] if lse else None,
    )
    with ForwardContext(case.batch, case.pool, fa3.normal):
        UNIFIED_ATTENTION(case.query, case.key, case.value, output, LAYER, True, sinks=case.sinks, lse_out=lse_out)
    close(output, expected, dtype)
    if lse:
        torch.testing.assert_close(lse_out, expected_lse, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dims", [(8, 16), (64, 128), (192, 128), (64, 512)])
def test_unequal_head_dims(fa3, dims):
    spec = dataclasses.replace(spec_of(), qk_head_dim=dims[0], v_head_dim=dims[1], scale=0.1)
    agree(make([(3, 1), (0, 5)], spec, page_size=4, dtype=BF16), fa3.normal, lse=True)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_sinks_that_the_kernel_can_not_take(fa3, dtype):
    """72 heads, or another dtype: they are applied through the log-sum-exp."""
    spec = dataclasses.replace(spec_of("sinks"), num_q_heads=72 if dtype is BF16 else 4)
    case = make(MODES[ForwardMode.MIXED], spec, page_size=4, dtype=BF16, extra_rows=1)
    case.sinks = torch.linspace(-2, 3, spec.num_q_heads).to(dtype)
    agree(case, fa3.normal, lse=True)


@pytest.mark.parametrize("pool_dtype", [torch.float16])
def test_a_pool_of_another_dtype(fa3, pool_dtype):
    case = make(MODES[ForwardMode.MIXED], page_size=4, dtype=BF16)
    pool = KVPool(case.pool.layers, case.pool.num_pages, 4, pool_dtype)
    pool.storage.copy_(case.pool.storage)
    case.pool = pool
    agree(case, fa3.normal)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.sampled_from([0, 0, 1, 3, 7, 15, 16, 17, 31]), st.integers(1, 6)), min_size=1, max_size=5),
    feature=st.sampled_from(DECLARED),
    page_size=st.sampled_from([1, 2, 16, 64]),
    layout=st.sampled_from(LAYOUTS),
    strides=st.sampled_from(STRIDES),
    extra_rows=st.integers(0, 3),
    dtype=st.sampled_from([BF16, torch.float16]),
    lse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch(fa3, lengths, feature, page_size, layout, strides, extra_rows, dtype, lse, seed):
    case = make(
        lengths, spec_of(feature), page_size=page_size, layout=layout, strides=strides, extra_rows=extra_rows, dtype=dtype, seed=seed
    )  # fmt: skip
    agree(case, fa3.normal, lse=lse)


def test_an_idle_step_calls_nothing_and_gives_zeros(fa3):
    case = make([(0, 2)], dtype=BF16)
    case.batch = type(case.batch).build([], case.pool.page_size)
    before, calls = bits(case.pool.storage).clone(), len(fa3.op.kernels)
    output, lse = run(case, fa3.normal, lse=True)
    assert not output.any() and not lse.any() and len(fa3.op.kernels) == calls
    assert torch.equal(bits(case.pool.storage), before)


def test_one_call_serves_a_mixed_batch_and_writes_the_output_itself(fa3):
    case = make(MODES[ForwardMode.MIXED], page_size=4, extra_rows=3, dtype=BF16)
    calls = len(fa3.op.kernels)
    output, _ = run(case, fa3.normal)
    assert len(fa3.op.kernels) == calls + 1 and fa3.op.kernels[-1][4] == 0  # it chooses its splits itself
    assert fa3.op.written == output.data_ptr()


def test_a_layer_that_shares_kv_reads_but_does_not_write(fa3):
    case = make(MODES[ForwardMode.MIXED], page_size=4, dtype=BF16)
    first, _ = run(case, fa3.normal)
    case.pool = pool = _with_shared_layer(case)
    before = bits(pool.storage).clone()
    case.key, case.value = case.key * float("nan"), case.value * float("nan")
    output, _ = run(case, fa3.normal, save=False, layer=2)
    close(output, first, BF16)
    assert torch.equal(bits(pool.storage), before)


def _with_shared_layer(case):
    pool = KVPool([case.pool.layers[0], case.spec, dataclasses.replace(case.spec, kv_layer=LAYER)], case.pool.num_pages, 4, BF16)
    pool.key(LAYER).copy_(case.pool.key(LAYER))
    pool.value(LAYER).copy_(case.pool.value(LAYER))
    return pool


def kernels_of(fa3, lengths, spec, page_size):
    start = len(fa3.op.kernels)
    run(make(lengths, spec, page_size=page_size, dtype=BF16), fa3.normal)
    return fa3.op.kernels[start:]


def test_the_kernel_depends_on_the_batch(fa3):
    """One of the reasons why fa3 does not declare batch-invariant results: the page table's width and the longest query choose."""
    spec = dataclasses.replace(spec_of("window"), sliding_window=16)
    assert len({k for lengths in ([(3, 1)], [(3, 1), (40, 1)]) for k in kernels_of(fa3, lengths, spec, 16)}) == 2
    assert len({k for lengths in ([(3, 1)], [(3, 1), (0, 9)]) for k in kernels_of(fa3, lengths, spec_of(), 16)}) == 2


def test_decode_passes_nothing_that_a_captured_graph_would_freeze(fa3):
    """Steps of other lengths, the same page table's width: the same host arguments and the same addresses of what the plan owns."""
    plans = [
        fa3.normal.plan((c := make(lengths, page_size=64, dtype=BF16)).batch, c.pool)
        for lengths in ([(70, 1)] * 3, [(1, 1), (9, 1), (80, 1)])
    ]
    assert plans[0].longest_query == plans[1].longest_query == 1
    assert plans[0].left_pad.data_ptr() == plans[1].left_pad.data_ptr()


def test_growing_the_zeros_keeps_the_old_ones(fa3):
    backend = FA3Backend()
    small, large = (make([(1, 1)] * n, page_size=64, dtype=BF16) for n in (3, 300))
    first = backend.plan(small.batch, small.pool).left_pad
    second = backend.plan(large.batch, large.pool).left_pad
    assert first.data_ptr() != second.data_ptr() and second.shape == (300,) and backend._zeros[0].data_ptr() == first.data_ptr()


def test_a_plan_reads_no_device_memory_and_layers_are_looked_at_once(fa3):
    case = make(MODES[ForwardMode.DECODE], dtype=BF16)
    meta = dataclasses.replace(
        case.batch, **{name: getattr(case.batch, name).to("meta") for name in ("seq_lens", "page_table", "query_start")}
    )
    plans = [fa3.normal.plan(meta, case.pool) for _ in range(2)]
    assert plans[0].layers is plans[1].layers


def test_a_pool_that_the_kernel_can_not_load_from_is_refused(fa3):
    """A layer of another kind, with rows of 33 numbers, lies before."""
    other = type("Other", (AttentionSpec,), {"by_backend": False})(1, 1, 33, 0, 1.0, kv_layer=0)
    pool = KVPool([other, spec_of()], 4, 1, BF16)
    with pytest.raises(UnsupportedError, match="fa3 loads 8 numbers at a time, and layer 1's lie at strides"):
        fa3.normal.plan(make([(1, 1)], page_size=1, dtype=BF16).batch, pool)


def test_a_pool_is_forgotten_with_its_last_user(fa3):
    backend, case = FA3Backend(), make([(1, 1)], dtype=BF16)
    first, second = (backend.plan(case.batch, case.pool).layers for _ in range(2))
    assert first is second
    pool, kept = weakref.ref(case.pool), weakref.ref(first[0].key)
    del case, first, second
    assert pool() is None and kept() is None


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"architecture": 80}, "needs SM90, this GPU is SM80"),
        ({"dtype": torch.float32}, "dtype float32 is not among bfloat16, float16"),
        ({"spec": spec_of("alibi")}, "no ALiBi"),
        ({"extra": frozenset({Feature.DETERMINISTIC})}, "no batch-invariant results"),
        ({"spec": spec_of("unequal_dims")}, "head dims 8/4 of qk/v are not among 64/128, 64/256, 64/512, 192/128"),
        ({"spec": dataclasses.replace(spec_of(), qk_head_dim=20, v_head_dim=20)}, "head dim 20 is not in 8 to 256 in steps of 8"),
    ],
)
def test_what_it_refuses(change, reason):
    good = Problem(spec_of(), BF16, BF16, 16, "cuda", 90)
    assert unmet(FA3Backend.capabilities, good) == []
    assert unmet(FA3Backend.capabilities, dataclasses.replace(good, **change)) == [reason]


def test_deterministic_is_refused():
    with pytest.raises(UnsupportedError, match="fa3 is not batch-invariant"):
        FA3Backend(deterministic=True)


def test_the_import_error_holds_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    with pytest.raises(ImportError, match=r"pip install .*\[sgl\]'"):
        FA3Backend()
