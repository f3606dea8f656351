"""`torch.ops.paged_attn.lora`: adds each row's low-rank adapter to the result of a linear layer, or of several merged into one product.
`lora_up` is its second half, for layers whose own product includes the first half.

Both read nothing but their operands, so they stay inside a piece and inside captured graphs. All adapters lie stacked in tensors that are
created once, so putting another adapter into a slot changes no address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.gpu_kernel import GpuKernel
from paged_attn.attn_ops.ops.define import define_op, like_first

LORA_KERNEL, LORA_UP_KERNEL = GpuKernel(), GpuKernel()
_HALVES = (torch.bfloat16, torch.float16)


def lora_one_by_one(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]) -> Tensor:
    """Computes one adapter after the other; 16-bit types in float32, as peft does by default. Waits for the device."""
    flat = x.reshape(-1, x.shape[-1])
    return _added(y, lambda own, slot, dtype: F.linear(flat[own].to(dtype), a[slot].to(dtype)), b, scales, slots, rows)


def lora_up_one_by_one(y: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]) -> Tensor:
    """See `lora_one_by_one`."""
    adapters, outputs, _ = b.shape
    inner = y[..., outputs:].reshape(slots.shape[0], adapters, -1)
    return _added(y[..., :outputs], lambda own, slot, dtype: inner[own, slot].to(dtype), b, scales, slots, rows)


def _added(
    y: Tensor, inner_of: Callable[[Tensor, int, torch.dtype], Tensor], b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]
) -> Tensor:
    """`inner_of(rows, adapter, dtype)`: some rows times the adapter's first factors, [rows, P R]."""
    output, rank = y.clone(memory_format=torch.contiguous_format), b.shape[2]
    result = output.view(-1, y.shape[-1])
    dtype = torch.float32 if y.dtype in _HALVES else y.dtype
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        own = (slots == slot).nonzero()[:, 0]
        inner = inner_of(own, slot, dtype)
        added = [
            F.linear(inner[:, part * rank : (part + 1) * rank], factor.to(dtype)) * scales[slot, part].to(dtype)
            for part, factor in enumerate(b[slot].split(list(rows)))
        ]
        result[own] = (result[own].to(dtype) + torch.cat(added, 1)).to(y.dtype)
    return output


def _run(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]) -> Tensor:
    result: Tensor | None = LORA_KERNEL(y, x, a, b, scales, slots, rows)
    return lora_one_by_one(y, x, a, b, scales, slots, rows) if result is None else result


def _run_up(y: Tensor, b: Tensor, scales: Tensor, slots: Tensor, rows: Sequence[int]) -> Tensor:
    result: Tensor | None = LORA_UP_KERNEL(y, b, scales, slots, rows)
    return lora_up_one_by_one(y, b, scales, slots, rows) if result is None else result


def _fake_up(y: Tensor, b: Tensor, *_: object) -> Tensor:
    return y.new_empty((*y.shape[:-1], b.shape[1]))


# y [..., N] and x [..., K] of T rows each; for S adapters of rank R or less a [S, P R, K], b [S, N, R] and scales [S, P] float32, where
# the P parts of y have `rows` outputs each, N together; slots [T] int32, a row's adapter or -1 -> y plus, for a row with adapter s and
# each part p, scales[s, p] * b[s, outputs of p] @ (a[s, p R : (p + 1) R] @ x).
LORA = define_op("lora(Tensor y, Tensor x, Tensor a, Tensor b, Tensor scales, Tensor slots, int[] rows) -> Tensor", _run, like_first)

# The same -> [..., N], for y [..., N + S P R], which holds the products with `a` after those of the layer, in the dtype of y.
LORA_UP = define_op("lora_up(Tensor y, Tensor b, Tensor scales, Tensor slots, int[] rows) -> Tensor", _run_up, _fake_up)
