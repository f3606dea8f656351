"""Common code of the FlashAttention backends: windows, supported layouts, sinks applied afterwards."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionCall


def window_of(spec: AttentionSpec) -> tuple[int, int]:
    """(left, right) in FlashAttention's terms: keys i - left to i + right, -1 without a bound; our window includes i itself."""
    return -1 if spec.sliding_window is None else spec.sliding_window - 1, 0 if spec.causal else -1


def kernel_takes(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel that moves 16 bytes at a time can use this [rows, heads, dim] of 16-bit numbers in place."""
    row, head, last = tensor.stride()
    # A fake tensor has no address, only one within its memory.
    address = tensor.storage_offset() * tensor.itemsize if isinstance(tensor, FakeTensor) else tensor.data_ptr()
    return last == 1 and row % 8 == 0 and head % 8 == 0 and address % 16 == 0 and tensor.dtype is dtype


def check_pool(pool: KVPool, backend: str) -> None:
    """Checks, once per pool, that kernels can load from each layer's pages 16 bytes at a time, since they do not check it themselves.

    Raises:
        UnsupportedError: a layer whose rows are not whole groups of 8 shifts the layers after it.
    """
    for index, spec in enumerate(pool.layers):
        for tensor in (pool.key(index), pool.value(index)) if spec.by_backend else ():
            if any(stride % 8 for stride in tensor.stride()[:-1]) or tensor.data_ptr() % 16:
                raise UnsupportedError(
                    f"{backend} loads 8 numbers at a time, and layer {index}'s lie at strides {tensor.stride()}, offset "
                    f"{tensor.storage_offset()}, in pages of {pool.page_size} tokens; take a page size that is a multiple of 8, or "
                    "another backend, such as 'triton'"
                )


def for_kernel(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor [rows, heads, dim] if the kernel can use it, else a contiguous copy."""
    return tensor if kernel_takes(tensor, dtype) else scratch_like(tensor, dtype).copy_(tensor)


def scratch_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def key_starts(batch: Batch) -> Tensor:
    """[R + 1] int32, the exclusive prefix sum of seq_lens, computed on the device."""
    starts = batch.seq_lens.new_zeros(batch.num_requests + 1)
    torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=starts[1:])
    return starts


def finish(call: AttentionCall, result: Tensor | None, lse: Tensor | None, count: int, sinks: Tensor | None = None) -> None:
    """Stores a kernel's results for the first `count` rows in the call's outputs.

    result [>= count, q_heads, v_dim], or None if the kernel wrote `call.output` itself; lse [>= count, q_heads] float32, natural log,
    needed for `sinks` and `call.lse_out`; sinks [q_heads], of any dtype, if the kernel ignored them. A sink s adds exp(s) to the
    softmax's denominator exp(lse), so it scales the output by exp(lse) / (exp(lse) + exp(s)).
    """
    output = call.output[:count]
    if sinks is None:
        if result is not None:
            output.copy_(result[:count])
        if call.lse_out is not None and lse is not None:
            call.lse_out[:count].copy_(lse[:count])
        return
    assert lse is not None
    lse, logits = lse[:count], sinks.float()
    torch.mul(output if result is None else result[:count], torch.sigmoid(lse - logits)[..., None], out=output)
    if call.lse_out is not None:
        torch.logaddexp(lse, logits, out=call.lse_out[:count])
