"""A stand-in for FlashInfer 0.6.8: its signatures, what its C++ checks, and what it leaves unchecked, computed by plain torch on the CPU.

Where the real kernels silently give wrong numbers (an output that is not contiguous, a wrong plan, a bidirectional window), the fake
raises. `install(monkeypatch)` puts it where `import flashinfer` finds it; `CALLS` lists the kernels that ran.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType

import torch

CALLS: list[str] = []
HEAD_DIMS = (64, 128, 256)
DECODE_GROUPS = (1, 2, 3, 4, 8)
DTYPES = (torch.float16, torch.bfloat16)
SINK_DECLS = {"fa2": "fa2 sink", "fa3": "fa3 sink"}
INT32 = torch.int32
WORKSPACE = 1 << 20  # bytes; the real ones want 128 MiB, which would take most of the tests' time to zero


def attend(query, keys, values, *, scale, causal=False, window_left=-1, softcap=0.0, sinks=None):
    """query [n, heads, dim] at the end of keys and values [length, kv_heads, dim]: float32 output and log-sum-exp of base 2."""
    new, heads, _ = query.shape
    length, kv_heads, _ = keys.shape
    k, v = (t.float().repeat_interleave(heads // kv_heads, dim=1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    row, column = torch.arange(new)[:, None], torch.arange(length)[None]
    seen = torch.ones(new, length, dtype=torch.bool)
    if causal:
        seen &= column <= length - new + row
    if window_left >= 0:
        seen &= column + new + window_left >= length + row
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks[:, None, None].expand(heads, new, 1)
        scores = torch.cat([scores, column], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T * math.log2(math.e)


def is_vectored(tensor):
    step = 16 // tensor.element_size()
    return tensor.stride(-1) == 1 and not any(s % step for s in tensor.stride()[:-1]) and tensor.data_ptr() % 16 == 0


def check_int32(*tensors):
    for tensor in tensors:
        assert tensor.dtype is INT32 and tensor.dim() == 1 and tensor.is_contiguous(), (tensor.dtype, tensor.shape, tensor.stride())


def check_output(out, lse, shape, dtype, return_lse, any_strides):
    assert out.shape == shape and out.dtype is dtype and is_vectored(out)
    assert any_strides or out.is_contiguous(), "the kernel would take this output for contiguous"
    assert return_lse == (lse is not None)
    if lse is not None:
        assert lse.shape == shape[:2] and lse.dtype is torch.float32 and lse.is_contiguous()


def check_pages(k, v):
    assert k.dim() == v.dim() == 4 and k.stride() == v.stride(), "k/v strides differ"
    assert is_vectored(k) and is_vectored(v)


class Wrapper:
    """What the three wrappers share."""

    def __init__(self, workspace, kv_layout, use_cuda_graph):
        assert kv_layout == "NHD" and workspace.dtype is torch.uint8 and workspace.numel() >= WORKSPACE and not workspace[:1024].any()
        self.use_cuda_graph, self.planned, self.indices = use_cuda_graph, None, None

    def keep(self, tables, buffers):
        """As `plan` does: buffers of a graph are filled, else the tensors are copied to the device."""
        if self.use_cuda_graph:
            for name, tensor in tables.items():
                buffer = buffers[name]
                if name == "indices":
                    assert len(tensor) <= len(buffer), "the size of indices should be less than or equal to the allocated buffer"
                else:
                    assert len(tensor) == len(buffer), "the batch size should be fixed in cudagraph mode"
                buffer[: len(tensor)].copy_(tensor)
            self.tables = buffers
        else:
            self.tables = {name: tensor.clone() for name, tensor in tables.items()}

    def lengths(self, page_size):
        indptr, last = self.tables["indptr"], self.tables["last"]
        assert (last >= 1).all() and (last <= page_size).all()
        return ((indptr[1:] - indptr[:-1] - 1).clamp(min=0) * page_size + last).tolist()

    def pages_of(self, request, pool, length):
        indptr = self.tables["indptr"].tolist()
        pages = self.tables["indices"][indptr[request] : indptr[request + 1]].long()
        return pool[pages].flatten(0, 1)[:length]


def unpack(paged_kv_cache):
    assert isinstance(paged_kv_cache, tuple)
    k, v = paged_kv_cache
    check_pages(k, v)
    return k, v


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False, paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto", jit_args=None,
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        assert jit_args is None and backend == "auto"
        self.use_tensor_cores = use_tensor_cores
        self.buffers = {"indptr": paged_kv_indptr_buffer, "indices": paged_kv_indices_buffer, "last": paged_kv_last_page_len_buffer}
        assert use_cuda_graph == all(b is not None for b in self.buffers.values())

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE", window_left=-1,
        logits_soft_cap=None, q_data_type="float16", kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None,
        rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        check_int32(indptr, indices, last_page_len)
        assert len(indptr) == len(last_page_len) + 1 and int(indptr[-1]) == len(indices) and int(indptr[0]) == 0
        self.keep({"indptr": indptr, "indices": indices, "last": last_page_len}, self.buffers)
        lengths = self.lengths(page_size)
        if seq_lens is not None:
            assert seq_lens.tolist() == lengths
            max(seq_lens.cpu()).item()
        group = num_qo_heads // num_kv_heads
        if not self.use_tensor_cores and group not in DECODE_GROUPS:
            raise RuntimeError(f"Unsupported group_size: {group}")
        assert head_dim in HEAD_DIMS and q_data_type in DTYPES and kv_data_type in (None, q_data_type) and window_left >= -1
        self.planned = (num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type)
        self.mask = {"window_left": window_left, "softcap": logits_soft_cap or 0.0, "scale": sm_scale or head_dim**-0.5}

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False, enable_pdl=None,
        window_left=None, sinks=None, q_len_per_req=1, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None,
    ):  # fmt: skip
        assert not args and sinks is None, "these kernels leave sinks out without a word"
        k, v = unpack(paged_kv_cache)
        heads, kv_heads, dim, page_size, dtype = self.planned
        assert q.dtype is dtype and k.dtype is dtype and is_vectored(q)
        lengths = self.lengths(page_size)
        if q.shape[0] != len(lengths):
            raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match batch_size * q_len_per_req")
        assert q.shape[1:] == (heads, dim) and k.shape[1:] == (page_size, kv_heads, dim)
        check_output(out, lse, q.shape, dtype, return_lse, any_strides=False)
        CALLS.append("decode:fa2" if self.use_tensor_cores else "decode")
        for request, length in enumerate(lengths):
            keys, values = self.pages_of(request, k, length), self.pages_of(request, v, length)
            result, sums = attend(q[request : request + 1], keys, values, **self.mask)
            out[request] = result[0].to(dtype)
            if lse is not None:
                lse[request] = sums[0]
        return (out, lse) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto",
        jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        assert backend in ("fa2", "fa3"), "auto would choose without a look at the batch"
        self.backend, self.jit_args, self.jit_kwargs = backend, jit_args, jit_kwargs or {}
        self.buffers = {
            "qo": qo_indptr_buf, "indptr": paged_kv_indptr_buf, "indices": paged_kv_indices_buf, "last": paged_kv_last_page_len_buf,
        }  # fmt: skip
        assert use_cuda_graph == all(b is not None for b in self.buffers.values())
        if jit_args is not None:
            name, q_dtype, kv_dtype, o_dtype, index, qk_dim, vo_dim, tensors, kinds, scalars, scalar_kinds, variant, decl = jit_args
            assert (tensors, kinds, scalars, scalar_kinds, variant) == (["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink")
            assert decl == SINK_DECLS[backend] and q_dtype is kv_dtype is o_dtype and index is INT32 and qk_dim == vo_dim
            assert str(qk_dim) in name and backend in name and not self.jit_kwargs["use_fp16_qk_reduction"]

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size,
        head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
        sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None,
        fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        check_int32(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices) and int(qo_indptr[0]) == int(paged_kv_indptr[0]) == 0
        tables = {"qo": qo_indptr, "indptr": paged_kv_indptr, "indices": paged_kv_indices, "last": paged_kv_last_page_len}
        self.keep(tables, self.buffers)
        lengths, new = self.lengths(page_size), (qo_indptr[1:] - qo_indptr[:-1]).tolist()
        assert seq_lens is None or seq_lens.tolist() == lengths
        assert max_token_per_sequence in (None, max(new)) and max_sequence_kv is None, "fa2 and fa3 fail with max_sequence_kv"
        if seq_lens is not None:
            max(seq_lens.cpu().flatten()).item()
        assert head_dim_qk in HEAD_DIMS and head_dim_vo in (None, head_dim_qk)
        assert q_data_type in DTYPES and kv_data_type in (None, q_data_type)
        assert causal or window_left < 0 or self.backend == "fa3" or max(new) == 1, "fa2 gets this wrong (flashinfer#4972)"
        assert min(new) >= 1 and (not causal or all(length >= n for length, n in zip(lengths, new, strict=True)))
        if self.jit_args is not None:
            assert (self.jit_args[1], self.jit_args[5]) == (q_data_type, head_dim_qk) and not logits_soft_cap
            assert self.jit_kwargs["use_sliding_window"] == (window_left >= 0)
        self.planned = (num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type)
        self.mask = {
            "causal": causal, "window_left": window_left, "softcap": logits_soft_cap or 0.0, "scale": sm_scale or head_dim_qk**-0.5,
        }  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False, enable_pdl=None,
        window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None,
    ):  # fmt: skip
        assert sinks is None, "fa2 and fa3 leave this argument out without a word"
        k, v = unpack(paged_kv_cache)
        heads, kv_heads, dim, page_size, dtype = self.planned
        mask, sink = dict(self.mask), None
        if self.jit_args is None:
            assert not args
        else:
            sink, mask["scale"] = args
            assert sink.dtype is torch.float32 and sink.shape == (heads,) and sink.is_contiguous()
        starts = self.tables["qo"].tolist()
        if q.shape[0] != starts[-1]:
            raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({starts[-1]})")
        assert q.dtype is dtype and k.dtype is dtype and is_vectored(q)
        assert q.shape[1:] == (heads, dim) and k.shape[1:] == (page_size, kv_heads, dim)
        check_output(out, lse, q.shape, dtype, return_lse, any_strides=self.backend == "fa3")
        CALLS.append(f"paged:{self.backend}" + (":sinks" if sink is not None else ""))
        for request, length in enumerate(self.lengths(page_size)):
            rows = slice(starts[request], starts[request + 1])
            keys, values = self.pages_of(request, k, length), self.pages_of(request, v, length)
            result, sums = attend(q[rows], keys, values, sinks=sink, **mask)
            out[rows] = result.to(dtype)
            if lse is not None:
                lse[rows] = sums
        return (out, lse) if return_lse else out


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, kv_indptr_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        assert backend in ("fa2", "fa3") and jit_args is None and not use_cuda_graph
        self.backend = backend

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None, packed_custom_mask=None,
        causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True,
        prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, fixed_split_size=None,
        disable_split_kv=False, seq_lens=None, seq_lens_q=None, max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None,
        o_indptr=None,
    ):  # fmt: skip
        check_int32(qo_indptr, kv_indptr)
        assert len(qo_indptr) == len(kv_indptr) and head_dim_qk in HEAD_DIMS and head_dim_vo in (None, head_dim_qk)
        assert causal or window_left < 0 or self.backend == "fa3"
        self.tables = {"qo": qo_indptr.clone(), "kv": kv_indptr.clone()}
        self.planned = (num_qo_heads, num_kv_heads, head_dim_qk, q_data_type)
        self.mask = {
            "causal": causal, "window_left": window_left, "softcap": logits_soft_cap or 0.0, "scale": sm_scale or head_dim_qk**-0.5,
        }  # fmt: skip

    def run(
        self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None,
    ):  # fmt: skip
        heads, kv_heads, dim, dtype = self.planned
        starts, kv_starts = self.tables["qo"].tolist(), self.tables["kv"].tolist()
        assert not args and q.dtype is k.dtype is v.dtype is dtype and all(map(is_vectored, (q, k, v)))
        assert q.shape == (starts[-1], heads, dim) and k.shape == v.shape == (kv_starts[-1], kv_heads, dim)
        check_output(out, lse, q.shape, dtype, return_lse, any_strides=self.backend == "fa3")
        CALLS.append(f"ragged:{self.backend}")
        for request in range(len(starts) - 1):
            rows, seen = slice(starts[request], starts[request + 1]), slice(kv_starts[request], kv_starts[request + 1])
            result, sums = attend(q[rows], k[seen], v[seen], **self.mask)
            out[rows] = result.to(dtype)
            if lse is not None:
                lse[rows] = sums
        return (out, lse) if return_lse else out


class BatchMLAPagedAttentionWrapper(Wrapper):
    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None,
        backend="auto",
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph)
        assert backend in ("fa2", "fa3")
        self.backend = backend
        self.buffers = {"qo": qo_indptr, "indptr": kv_indptr, "indices": kv_indices, "lengths": kv_len_arr}
        assert use_cuda_graph == all(b is not None for b in self.buffers.values())

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type,
        kv_data_type, use_profiler=False,
    ):  # fmt: skip
        check_int32(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert type(kv_len_arr) is torch.Tensor, "its bindings know no subclass"
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1 and int(kv_indptr[-1]) == len(kv_indices)
        assert ((kv_len_arr + page_size - 1) // page_size).equal(kv_indptr.diff()) and (kv_len_arr >= qo_indptr.diff()).all()
        assert (head_dim_ckv, head_dim_kpe) == (512, 64) and q_data_type is kv_data_type and q_data_type in DTYPES and not use_profiler
        assert causal or (qo_indptr.diff() == 1).all()
        self.keep({"qo": qo_indptr, "indptr": kv_indptr, "indices": kv_indices, "lengths": kv_len_arr}, self.buffers)
        self.planned = (num_heads, page_size, causal, sm_scale, q_data_type)

    def run(
        self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None, kv_len=None, page_table=None,
        return_lse_base_on_e=False,
    ):  # fmt: skip
        assert profiler_buffer is kv_len is page_table is None and not return_lse_base_on_e
        heads, page_size, causal, scale, dtype = self.planned
        starts = self.tables["qo"].tolist()
        assert q_nope.shape == (starts[-1], heads, 512) and q_pe.shape == (starts[-1], heads, 64)
        assert ckv_cache.shape[1:] == (page_size, 512) and kpe_cache.shape[1:] == (page_size, 64)
        assert q_nope.dtype is q_pe.dtype is ckv_cache.dtype is kpe_cache.dtype is dtype
        assert all(map(is_vectored, (q_nope, q_pe, ckv_cache, kpe_cache)))
        check_output(out, lse, q_nope.shape, dtype, return_lse, any_strides=True)
        CALLS.append(f"latent:{self.backend}" + (":causal" if causal else ""))
        rows = torch.cat((ckv_cache, kpe_cache), -1)[:, :, None]
        for request, length in enumerate(self.tables["lengths"].tolist()):
            of = slice(starts[request], starts[request + 1])
            keys = self.pages_of(request, rows, length)
            result, sums = attend(torch.cat((q_nope[of], q_pe[of]), -1), keys, keys[..., :512], scale=scale, causal=causal)
            out[of] = result.to(dtype)
            if lse is not None:
                lse[of] = sums
        return (out, lse) if return_lse else out


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    assert all(t.is_contiguous() for t in (v, s, v_other, s_other)) and s.dtype is s_other.dtype is torch.float32
    assert v.shape == v_other.shape and s.shape == s_other.shape == v.shape[:2] and mask is None
    assert v.shape[1] * (v.shape[2] // max(8, v.shape[2] // 32)) <= 1024, "too many threads for one block"
    CALLS.append("merge")
    total = torch.logaddexp2(s, s_other)
    v.copy_(v.float() * torch.exp2(s - total)[..., None] + v_other.float() * torch.exp2(s_other - total)[..., None])
    s.copy_(total)


def trtllm_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, window_left=-1, out=None,
    out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND", enable_pdl=None, backend="auto", q_len_per_req=1,
    o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None,
    uses_shared_paged_kv_idx=True,
):  # fmt: skip
    """XQA, which takes queries, outputs and tables for contiguous, strides of K for those of V, and divides strides by the head dim."""
    k, v = unpack(kv_cache)
    page_size, dim = k.shape[1], k.shape[3]
    assert backend == "xqa" and kv_layout == "NHD" and page_size in (16, 32, 64, 128) and dim in HEAD_DIMS
    assert query.dtype is k.dtype is v.dtype is out.dtype and query.dtype in DTYPES
    assert all(t.is_contiguous() for t in (query, out, block_tables, seq_lens)) and is_vectored(query) and is_vectored(out)
    assert not any(stride % dim for stride in k.stride()[:-1]), "strides are not in whole heads"
    assert block_tables.dtype is seq_lens.dtype is INT32 and block_tables.shape[0] == seq_lens.shape[0] == query.shape[0]
    assert max_seq_len == block_tables.shape[1] * page_size and type(bmm1_scale) is float and bmm2_scale == 1.0
    assert workspace_buffer.numel() >= 16 << 20 and not workspace_buffer[: 8 << 20].any(), "semaphores must be zero"
    assert sinks is None or (sinks.dtype is torch.float32 and sinks.shape == (query.shape[1],))
    CALLS.append("xqa")
    for request, length in enumerate(seq_lens.tolist()):
        pages = block_tables[request, : -(-length // page_size)].long()
        keys, values = (t[pages].flatten(0, 1)[:length] for t in (k, v))
        result, _ = attend(query[request : request + 1], keys, values, scale=bmm1_scale, window_left=window_left, sinks=sinks)
        out[request] = result[0].to(out.dtype)
    return out


def trtllm_batch_decode_with_kv_cache_mla(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, max_seq_len,
    sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, skip_softmax_threshold_scale_factor=None, enable_pdl=None,
    backend="auto", is_var_seq=True, uses_shared_paged_kv_idx=True,
):  # fmt: skip
    """trtllm-gen: pages at any distance, tables in blocks of 128 tokens, bfloat16 alone."""
    assert backend == "trtllm-gen" and sparse_mla_top_k == 0 and sinks is None and type(bmm1_scale) is float and bmm2_scale == 1.0
    count, new, heads, width = query.shape
    page_size = kv_cache.shape[1]
    assert (kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim) in ((512, 64, 128), (256, 64, 64)) and width == kv_lora_rank + 64
    assert new == 1 and kv_cache.shape[2] == width and kv_cache.dim() == 3 and page_size in (32, 64)
    assert query.dtype is kv_cache.dtype is out.dtype is torch.bfloat16 and out.shape == (count, 1, heads, kv_lora_rank)
    assert out.is_contiguous() and block_tables.is_contiguous() and all(map(is_vectored, (query, kv_cache, out)))
    assert block_tables.dtype is seq_lens.dtype is INT32 and block_tables.shape[0] == seq_lens.shape[0] == count
    assert block_tables.shape[1] % (128 // page_size) == 0 and max_seq_len == block_tables.shape[1] * page_size
    assert workspace_buffer.numel() >= 16 << 20 and not workspace_buffer[: 8 << 20].any(), "counters must be zero"
    CALLS.append("trtllm-gen")
    for request, length in enumerate(seq_lens.tolist()):
        keys = kv_cache[block_tables[request, : -(-length // page_size)].long()].flatten(0, 1)[:length, None]
        result, _ = attend(query[request], keys, keys[..., :kv_lora_rank], scale=bmm1_scale)
        out[request] = result.to(out.dtype)
    return out


def install(monkeypatch) -> ModuleType:
    """The fake as `flashinfer` and its submodules; CALLS is emptied."""
    package = ModuleType("flashinfer")
    for member in (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
        merge_state_in_place,
    ):
        setattr(package, member.__name__, member)
    modules = {"flashinfer": package}
    for name in ("decode", "mla", "jit", "jit.attention", "jit.attention.variants"):
        modules[f"flashinfer.{name}"] = ModuleType(f"flashinfer.{name}")
    package.decode, package.mla = modules["flashinfer.decode"], modules["flashinfer.mla"]
    package.mla.BatchMLAPagedAttentionWrapper = BatchMLAPagedAttentionWrapper
    package.decode.trtllm_batch_decode_with_kv_cache_mla = trtllm_batch_decode_with_kv_cache_mla
    package.decode.trtllm_batch_decode_with_kv_cache = trtllm_batch_decode_with_kv_cache
    modules["flashinfer.jit.attention.variants"].attention_sink_decl = SINK_DECLS
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    CALLS.clear()
    return package
