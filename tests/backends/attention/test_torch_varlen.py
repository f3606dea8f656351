"""torch_varlen against the float32 oracle: torch's own varlen_attn runs, over an ATen kernel that computes in plain PyTorch on the CPU."""

import dataclasses
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.attention.capabilities import Problem, unmet
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.torch_varlen import TorchVarlenBackend
from tests.backends.agreeing import agree as agree_with_oracle
from tests.backends.flash_kernels import Rules, check, check_loads, paged_attention
from tests.backends.problems import FEATURES, LAYER, LAYOUTS, STRIDES, bits, close, copy_of, make, new_output, run, spec_of

new_torch = pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="varlen_attn has no block_table before torch 2.13")
REFERENCE = ReferenceBackend()
BF16, PAGE = torch.bfloat16, 256
DECLARED = sorted(
    name for name in FEATURES if Problem(spec_of(name), BF16, BF16, PAGE, "cuda", 80).features <= TorchVarlenBackend.capabilities.features
)
MODES = {
    ForwardMode.EXTEND: [(0, 7), (0, 1), (0, 18), (9, 4)],
    ForwardMode.DECODE: [(1, 1), (15, 1), (256, 1), (30, 1)],
    ForwardMode.MIXED: [(17, 1), (0, 1), (254, 5), (33, 1), (0, 9)],
}


class FakeKernel:
    """aten::_flash_attention_forward with FlashAttention 2, or 3 if `implementation` says so."""

    implementation = None

    def __call__(
        self, q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None, window_size_left=None,
        window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        requests = cum_seq_q.shape[0] - 1
        check(q.dtype in (torch.float16, BF16) and k.dtype == q.dtype and v.dtype == q.dtype, "only supports fp16 and bf16")
        check_loads(q, k, v)
        for ints in (seqused_k, block_table, cum_seq_q):
            check(ints.dtype == torch.int32 and ints.is_contiguous(), "must have dtype int32 and be contiguous")
        check(seqused_k.shape == (requests,) and block_table.shape[0] == requests, "seqused_k must have shape (batch_size)")
        if self.implementation == "FA3":
            check(cum_seq_k is None, "If cu_seqlens_k is passed in, then page table is not supported")
        else:
            check(k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
            check(cum_seq_k.shape == (requests + 1,) and cum_seq_k.dtype == torch.int32, "cu_seqlens_k must have shape (batch_size + 1)")
            assert cum_seq_k[0] == 0 and cum_seq_k.diff().tolist() == seqused_k.tolist()
            assert num_splits == 1, "pytorch#194167: wrong results with more splits"
            swapped = max_q == 1 and q.shape[1] > k.shape[2] and window_size_left < 0
            check(not swapped or q.shape[0] == requests, "shape is invalid for input of size")
        assert max_q >= int(cum_seq_q.diff().max()) and max_k >= int(seqused_k.max()) and dropout_p == 0.0 and not return_debug_mask
        out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
        rules = Rules(scale, is_causal, window_size_left, window_size_right)
        lse = paged_attention(q, k, v, cum_seq_q.tolist(), seqused_k.tolist(), block_table, rules, out)
        return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


@pytest.fixture(scope="module")
def varlen():
    fake, library = FakeKernel(), torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", fake.__call__, "CPU")
    yield types.SimpleNamespace(backend=TorchVarlenBackend(), fake=fake)
    library._destroy()


def agree(case, backend, *, lse=False, save=True):
    agree_with_oracle(case, backend, lse=lse, save=save, lse_tolerance=2e-3)


@new_torch
@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("feature", DECLARED)
def test_every_declared_feature_in_every_mode(varlen, feature, mode, lse):
    agree(make(MODES[mode], spec_of(feature), page_size=PAGE, extra_rows=3, dtype=BF16), varlen.backend, lse=lse)


def test_the_features_of_the_problems_that_it_declares():
    assert set(DECLARED) == {
        "plain", "window", "window_1", "sinks", "bidirectional", "bidirectional_window", "mha", "gqa_7", "gqa_7_sinks",
    }  # fmt: skip


@new_torch
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [256, 512])
def test_page_layouts_in_float16(varlen, page_size, layout):
    lengths = [(2 * page_size + 3, 1), (page_size, 1), (page_size + 1, 2)]
    agree(make(lengths, page_size=page_size, layout=layout, dtype=torch.float16), varlen.backend)


@new_torch
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.MIXED], ids=lambda m: m.value)
@pytest.mark.parametrize("strides", STRIDES)
def test_odd_strides(varlen, strides, mode):
    case = make(MODES[mode], spec_of("sinks"), page_size=PAGE, strides=strides, extra_rows=2, dtype=BF16)
    expected, _ = run(copy_of(case), REFERENCE)
    output = new_output(case, strides)
    with ForwardContext(case.batch, case.pool, varlen.backend):
        UNIFIED_ATTENTION(case.query, case.key, case.value, output, LAYER, True, sinks=case.sinks)
    close(output, expected, BF16)


@new_torch
def test_first_tokens_alone_have_as_many_rows_as_requests(varlen):
    agree(make([(0, 1)] * 3, page_size=PAGE, extra_rows=4, dtype=BF16), varlen.backend, lse=True)


@new_torch
def test_flash_attention_3_gets_no_prefix_sum_of_the_keys(varlen, monkeypatch):
    monkeypatch.setattr(varlen.fake, "implementation", "FA3", raising=False)
    monkeypatch.setattr(varlen.backend, "_implementation", lambda: "FA3")
    agree(make(MODES[ForwardMode.MIXED], page_size=PAGE, dtype=BF16), varlen.backend, lse=True)


@new_torch
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.sampled_from([0, 0, 1, 3, 31, 255, 256]), st.integers(1, 4)), min_size=1, max_size=4),
    feature=st.sampled_from(DECLARED),
    layout=st.sampled_from(LAYOUTS),
    strides=st.sampled_from(STRIDES),
    extra_rows=st.integers(0, 3),
    lse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch(varlen, lengths, feature, layout, strides, extra_rows, lse, seed):
    case = make(
        lengths, spec_of(feature), page_size=PAGE, layout=layout, strides=strides, extra_rows=extra_rows, dtype=BF16, seed=seed
    )  # fmt: skip
    agree(case, varlen.backend, lse=lse)


@new_torch
def test_an_idle_step_gives_zeros_and_stores_nothing(varlen):
    case = make([(0, 2)], page_size=PAGE, dtype=BF16)
    case.batch = type(case.batch).build([], PAGE)
    before = bits(case.pool.storage).clone()
    output, lse = run(case, varlen.backend, lse=True)
    assert not output.any() and not lse.any() and torch.equal(bits(case.pool.storage), before)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"page_size": 16}, "page size 16 is not in 256 to 65536 in steps of 256"),
        ({"device": "cpu"}, "runs on cuda, not on cpu"),
        ({"spec": spec_of("softcap")}, "no softcap"),
    ],
)
def test_what_it_refuses(change, reason):
    good = Problem(spec_of(), BF16, BF16, PAGE, "cuda", 80)
    assert unmet(TorchVarlenBackend.capabilities, good) == []
    assert unmet(TorchVarlenBackend.capabilities, dataclasses.replace(good, **change)) == [reason]


def test_an_older_torch_is_refused_with_the_reason(monkeypatch):
    """The signature of torch 2.11."""
    from torch.nn.attention import varlen

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)): ...

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    with pytest.raises(ImportError, match=r"needs varlen_attn with block_table, which torch .* lacks: pip install 'torch>=2.13'"):
        TorchVarlenBackend()
    assert [(r.module, r.version) for r in TorchVarlenBackend.capabilities.requirements] == [("torch", "2.13")]
