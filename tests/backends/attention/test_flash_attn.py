"""flash_attn against the float32 oracle, through functions with the signatures of flash-attn 2.7 and 2.8 that compute in plain PyTorch.

They check what the real ones check, and return what those return: with ALiBi, a log-sum-exp that is not that of the scores.
"""

import dataclasses
import importlib.util
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.attention.capabilities import Problem, unmet
from paged_attn.backends.attention.flash_attn import FlashAttnBackend
from paged_attn.backends.attention.reference import ReferenceBackend
from tests.backends.agreeing import agree as agree_with_oracle
from tests.backends.flash_kernels import Rules, check, check_loads, paged_attention
from tests.backends.problems import FEATURES, LAYER, LAYOUTS, STRIDES, bits, close, copy_of, make, new_output, run, spec_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="the real flash_attn is installed: see tests/gpu"
)

REFERENCE = ReferenceBackend()
BF16, PAGE = torch.bfloat16, 256
FEATURES_HERE = FEATURES | {
    "alibi_window": {**FEATURES["alibi"], "sliding_window": 5},
    "alibi_widest_window": {**FEATURES["alibi"], "sliding_window": 18},  # as long as the longest request
    "alibi_wider_window": {**FEATURES["alibi"], "sliding_window": 19},  # which the kernel drops
    "alibi_softcap_sinks": {**FEATURES["alibi"], "softcap": 1.5, "has_sinks": True},
}
MODES = {
    ForwardMode.EXTEND: [(0, 7), (0, 1), (0, 18), (9, 4)],
    ForwardMode.DECODE: [(1, 1), (15, 1), (256, 1), (30, 1)],
    ForwardMode.MIXED: [(17, 1), (0, 1), (254, 5), (33, 1), (0, 9)],
}


def spec_here(feature):
    return dataclasses.replace(spec_of(), **FEATURES_HERE[feature])


def needs(feature):
    return Problem(spec_here(feature), BF16, BF16, PAGE, "cuda", 80).features


DECLARED = sorted(name for name in FEATURES_HERE if needs(name) <= FlashAttnBackend.capabilities.features)


class FakeFlashAttn:
    """The two functions; `calls` holds their names."""

    def __init__(self):
        self.calls = []

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        self.calls.append("varlen")
        requests = cu_seqlens_q.shape[0] - 1
        self._check(q, k, v, block_table, requests, alibi_slopes)
        for starts in (cu_seqlens_q, cu_seqlens_k):
            check(starts.dtype == torch.int32 and starts.shape == (requests + 1,) and starts.is_contiguous(), "cu_seqlens must be int32")
        lengths = cu_seqlens_k.diff().tolist()
        assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max()) and max_seqlen_k >= max(lengths) and requests > 0 and dropout_p == 0.0
        heads_swapped = max_seqlen_q == 1 and q.shape[1] > k.shape[2] and tuple(window_size) in ((-1, 0), (-1, -1)) and alibi_slopes is None
        check(not heads_swapped or q.shape[0] == requests, "shape is invalid for input of size")  # q.reshape({batch_size, ...})
        out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
        lse = paged_attention(
            q, k, v, cu_seqlens_q.tolist(), lengths, block_table,
            self._rules(softmax_scale, causal, window_size, softcap, alibi_slopes, max_seqlen_k), out,
        )  # fmt: skip
        return (out, lse, None) if return_attn_probs else out

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
        cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
    ):  # fmt: skip
        self.calls.append("kvcache")
        assert k is None and v is None and rotary_cos is None and cache_batch_idx is None and cache_leftpad is None
        requests, each = q.shape[:2]
        self._check(q, k_cache, v_cache, block_table, requests, alibi_slopes)
        check(cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (requests,), "seqlens_k must have dtype int32")
        rules = self._rules(softmax_scale, causal, window_size, softcap, alibi_slopes, block_table.shape[1] * k_cache.shape[1])
        out = torch.full(q.shape, float("nan"), dtype=q.dtype)
        starts = list(range(0, requests * each + 1, each))
        lse = paged_attention(
            q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens.tolist(), block_table, rules, out.view(-1, *q.shape[2:])
        )
        return (out, lse.unflatten(1, (requests, each)).transpose(0, 1)) if return_softmax_lse else out

    def _check(self, q, k, v, block_table, requests, slopes):
        check(q.dtype in (torch.float16, BF16), "FlashAttention only support fp16 and bf16 data type")
        check(k.dtype == q.dtype and v.dtype == q.dtype, "query and key must have the same dtype")
        check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        check(k.shape == v.shape and q.shape[-1] == k.shape[-1], "k must have shape (num_blocks, page_block_size, num_heads_k, head_size)")
        check(q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, "head_size must be a multiple of 8")
        check(block_table.dtype == torch.int32 and block_table.shape[0] == requests, "block_table must have dtype torch.int32")
        check(slopes is None or (slopes.dtype == torch.float32 and slopes.shape == (q.shape[-2],)), "ALiBi slopes must have dtype fp32")
        check_loads(q, k, v)

    def _rules(self, scale, causal, window, softcap, slopes, longest):
        left, right = window[0], 0 if causal else window[1]
        left, right = (-1 if side >= longest else side for side in (left, right))
        return Rules(scale, causal, left, right, softcap=softcap, slopes=slopes, alibi_by_key=left < 0 and right == 0)


@pytest.fixture(scope="module")
def flash():
    fake = FakeFlashAttn()
    package = types.ModuleType("flash_attn")
    package.flash_attn_varlen_func, package.flash_attn_with_kvcache = fake.flash_attn_varlen_func, fake.flash_attn_with_kvcache
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", package)
        yield types.SimpleNamespace(backend=FlashAttnBackend(), fake=fake)


def agree(case, backend, *, lse=False, save=True):
    agree_with_oracle(case, backend, lse=lse, save=save, lse_tolerance=2e-3)


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("feature", DECLARED)
def test_every_declared_feature_in_every_mode(flash, feature, mode, lse):
    case = make(MODES[mode], spec_here(feature), page_size=PAGE, extra_rows=3, dtype=BF16)
    flash.fake.calls.clear()
    agree(case, flash.backend, lse=lse)
    assert flash.fake.calls == ["kvcache" if mode is ForwardMode.DECODE else "varlen"]


def test_the_features_of_the_problems_that_it_declares():
    assert set(FEATURES) - set(DECLARED) == {
        "chunk", "window_chunk", "bidirectional_chunk", "bias_by_distance", "bias_by_key", "windowed_bias", "unequal_dims", "wider_v",
        "all",
    }  # fmt: skip


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.MIXED], ids=lambda m: m.value)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [256, 512])
def test_page_layouts_in_float16(flash, page_size, layout, mode):
    lengths = [(2 * page_size + 3, 1), (page_size, 1), (page_size + 1, 1 if mode is ForwardMode.DECODE else 2)]
    agree(make(lengths, page_size=page_size, layout=layout, dtype=torch.float16), flash.backend)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.MIXED], ids=lambda m: m.value)
@pytest.mark.parametrize("strides", STRIDES)
def test_odd_strides(flash, strides, mode):
    case = make(MODES[mode], spec_of("sinks"), page_size=PAGE, strides=strides, extra_rows=2, dtype=BF16)
    expected, _ = run(copy_of(case), REFERENCE)
    output = new_output(case, strides)
    with ForwardContext(case.batch, case.pool, flash.backend):
        UNIFIED_ATTENTION(case.query, case.key, case.value, output, LAYER, True, sinks=case.sinks)
    close(output, expected, BF16)


def test_first_tokens_alone_have_as_many_rows_as_requests(flash):
    """Padded rows must not reach the kernel, which takes q apart by requests when each has one token."""
    agree(make([(0, 1)] * 3, page_size=PAGE, extra_rows=4, dtype=BF16), flash.backend, lse=True)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.sampled_from([0, 0, 1, 3, 31, 255, 256]), st.integers(1, 4)), min_size=1, max_size=4),
    feature=st.sampled_from(DECLARED),
    layout=st.sampled_from(LAYOUTS),
    strides=st.sampled_from(STRIDES),
    extra_rows=st.integers(0, 3),
    lse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch(flash, lengths, feature, layout, strides, extra_rows, lse, seed):
    case = make(
        lengths, spec_here(feature), page_size=PAGE, layout=layout, strides=strides, extra_rows=extra_rows, dtype=BF16, seed=seed
    )  # fmt: skip
    agree(case, flash.backend, lse=lse)


def test_an_idle_step_calls_nothing_and_gives_zeros(flash):
    case = make([(0, 2)], page_size=PAGE, dtype=BF16)
    case.batch = type(case.batch).build([], PAGE)
    before = bits(case.pool.storage).clone()
    flash.fake.calls.clear()
    output, lse = run(case, flash.backend, lse=True)
    assert not output.any() and not lse.any() and not flash.fake.calls
    assert torch.equal(bits(case.pool.storage), before)


def test_alibi_in_a_bidirectional_layer_is_refused_with_the_reason(flash):
    spec = dataclasses.replace(spec_of("alibi"), causal=False, module="encoder.0")
    case = make([(0, 3)], spec, page_size=PAGE, dtype=BF16)
    with pytest.raises(UnsupportedError, match=r"layer 0 \(encoder.0\) is bidirectional with ALiBi, .* take another backend"):
        run(case, flash.backend)


def test_a_decode_plan_holds_nothing_of_the_lengths(flash):
    """So that a captured graph may keep its host arguments."""
    batches = [make(lengths, page_size=PAGE, dtype=BF16) for lengths in ([(70, 1)] * 3, [(1, 1), (9, 1), (80, 1)])]
    plans = [flash.backend.plan(case.batch, case.pool) for case in batches]
    assert plans[0].longest == plans[1].longest == PAGE and plans[0].longest_query == plans[1].longest_query == 1


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"page_size": 16}, "page size 16 is not in 256 to 65536 in steps of 256"),
        ({"architecture": 75}, "needs SM80, SM86, SM87, SM89, SM90, SM100, SM120, this GPU is SM75"),
        ({"spec": spec_of("chunk")}, "no chunked attention"),
    ],
)
def test_what_it_refuses(change, reason):
    good = Problem(spec_of(), BF16, BF16, PAGE, "cuda", 80)
    assert unmet(FlashAttnBackend.capabilities, good) == []
    assert unmet(FlashAttnBackend.capabilities, dataclasses.replace(good, **change)) == [reason]


def test_the_import_error_holds_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ImportError, match=r"pip install .*\[flash-attn\]'"):
        FlashAttnBackend()
