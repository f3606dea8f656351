"""torch.ops.sgl_kernel.fwd with the schema that sglang-kernel 0.4.2.post2 registers, in plain PyTorch.

It checks what the real one checks, and refuses or spoils what the real one gets wrong without a word.
"""

import sys
import types
from contextlib import contextmanager

import pytest
import torch

from tests.backends.flash_kernels import Rules, check, check_loads, paged_attention

BF16 = torch.bfloat16
SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, "
    "Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float? softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, int attention_chunk, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin, Tensor? sinks) -> (Tensor(a!), Tensor, Tensor, Tensor)"
)
NAMES = [argument.split()[-1] for argument in SCHEMA[4 : SCHEMA.index(") ->")].split(", ")]


class FakeFA3:
    """The op; of each call what chose the kernel, and where the last one wrote."""

    def __init__(self):
        self.kernels, self.written = [], 0

    def __call__(self, *arguments):
        a = types.SimpleNamespace(**dict(zip(NAMES, arguments, strict=True)))
        unused = "k_new v_new cu_seqlens_k cu_seqlens_k_new seqused_q kv_batch_idx rotary_cos rotary_sin seqlens_rotary q_descale " \
            "k_descale v_descale scheduler_metadata"  # fmt: skip
        assert all(getattr(a, name) is None for name in unused.split())
        self.check(a)
        tma = self.choose(a)
        out = torch.empty(*a.q.shape[:2], a.v.shape[-1], dtype=a.q.dtype) if a.out is None else a.out
        self.written = out.data_ptr()
        rules = Rules(
            a.softmax_scale, a.is_causal, a.window_size_left, a.window_size_right, a.attention_chunk, a.softcap, sinks=a.sinks
        )  # fmt: skip
        latent = a.q_v is not None
        q, k = (torch.cat((a.q_v, a.q), -1), torch.cat((a.v, a.k), -1)) if latent else (a.q, a.k)
        lse = paged_attention(q, k, a.v, a.cu_seqlens_q.tolist(), a.seqused_k.tolist(), a.page_table, rules, out, whole_pages=tma)
        return out, lse, torch.empty(0), torch.empty(0)

    def check(self, a):
        dims = a.q.shape[-1], a.v.shape[-1]
        check(a.q.dtype in (torch.float16, BF16), "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
        check(a.k.dtype == a.q.dtype and a.v.dtype == a.q.dtype, "query and key must have the same dtype")
        check(a.out is None or a.out.dtype == a.q.dtype, "For FP16/BF16 input, output must have the same dtype as inputs")
        check_loads(a.q, a.k, a.v, *([] if a.out is None else [a.out]))
        for ints in (a.page_table, a.cu_seqlens_q, a.seqused_k):
            check(ints.dtype == torch.int32 and ints.stride(-1) == 1, "must have dtype int32 and a contiguous last dimension")
        requests = a.cu_seqlens_q.shape[0] - 1
        check(a.cu_seqlens_q.is_contiguous() and a.seqused_k.shape == (requests,), "seqused_k must have shape (batch_size)")
        check(a.page_table.shape[0] == requests, "batch_size must be equal to batch_size_k")
        check(
            a.k.shape[:3] == a.v.shape[:3] and a.k.shape[-1] == dims[0], "k must have shape (num_pages, page_size, num_heads_k, head_size)"
        )
        check(a.out is None or a.out.shape == (*a.q.shape[:2], dims[1]), "out must have shape (total_q, num_heads, head_size_v)")
        check(all(dim % 8 == 0 for dim in dims) and dims[0] <= 256, "head_size should be a multiple of 8")
        qk, v = dims
        check(qk == v or (128 < qk <= 192 and 96 < v <= 128) or (qk <= 64 and v <= 512), "If V headdim is different from Q/K dim, ...")
        check(a.max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided")
        assert a.max_seqlen_q >= int(a.cu_seqlens_q.diff().max()) and requests > 0
        if a.q_v is not None:
            check(qk <= 64, "q_v is only supported for head_size <= 64")
            check(v >= 256, "q_v is only supported for hdim_v >= 256.")
            check(a.q_v.dtype == a.q.dtype, "q_v must have the same dtype as query")
            check(a.q_v.shape == (*a.q.shape[:2], v), "q_v must have shape (total_q, num_heads, head_size_v)")
            check_loads(a.q_v)
        if a.leftpad_k is not None:
            check(a.leftpad_k.dtype == torch.int32 and a.leftpad_k.shape == (requests,) and a.leftpad_k.is_contiguous(), "leftpad_k")
            assert not a.leftpad_k.any()
        if a.sinks is not None:
            check(a.sinks.dtype == BF16, "sinks must have dtype bfloat16")
            check(a.sinks.shape == (a.q.shape[1],) and a.sinks.is_contiguous(), "sinks must have shape (num_heads)")
            assert a.q.shape[1] <= 64, "the kernel's shared memory holds 64 sinks"

    def choose(self, a):
        """The choices of flash_api.cpp, as far as they pick another kernel; returns whether pages are read by TMA."""
        left, right, causal, page_size = a.window_size_left, a.window_size_right, a.is_causal, a.k.shape[1]
        dim = next(d for d in (64, 96, 128, 192, 256) if a.q.shape[-1] <= d)
        left = -1 if left >= a.page_table.shape[1] * page_size - 1 else left
        right = -1 if right >= a.max_seqlen_q - 1 else right
        if a.max_seqlen_q == 1 and left == right == -1 and not a.attention_chunk and dim != 128 and dim != 96:
            causal = False
        right = 0 if causal else right
        is_causal = left < 0 and right == 0 and not a.attention_chunk
        is_local = (left >= 0 or right >= 0 or a.attention_chunk > 0) and not is_causal
        rows, keys = {64: (192, 128 if is_causal or is_local else 192), 96: (192, 128 if is_local else 144),
                      128: (128, 128 if is_causal or is_local else 176), 192: (128, 96 if is_local else 112),
                      256: (128, 64 if is_local else 80)}[dim]  # fmt: skip
        if a.v.shape[-1] > 256:
            rows, keys = 64, 64
        tma = a.leftpad_k is None and page_size % keys == 0 and a.max_seqlen_q * (a.q.shape[1] // a.k.shape[2]) > rows
        self.kernels.append((dim, is_causal, is_local, tma, a.num_splits, a.softcap > 0))
        return tma


@contextmanager
def installed():
    """The op behind a package of the right name."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define(SCHEMA)
    fake = FakeFA3()
    library.impl("fwd", fake.__call__, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        package = types.ModuleType("sgl_kernel")
        package.flash_attn = types.ModuleType("sgl_kernel.flash_attn")
        patch.setitem(sys.modules, "sgl_kernel", package)
        patch.setitem(sys.modules, "sgl_kernel.flash_attn", package.flash_attn)
        yield fake
    library._destroy()
