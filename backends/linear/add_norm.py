"""A residual addition and an RMS norm in one launch; for a single row in that of the product behind them.

For one row a norm of its own takes 2 to 4 us, most of it waiting: for the kernel in front, for the row, and the next kernel for it. A
product holds its weights in registers by then, and adds and squares the row while they arrive.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.linear.add_norm_kernel import add_norm_kernel, add_norm_linear_kernel
from paged_attn.backends.linear.gemv import PROGRAM_ELEMENTS, Blocks, fits, row_blocks
from paged_attn.backends.machine import machine_of, power_of_2
from paged_attn.backends.unit_stride import unit_last

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST = 32768  # elements of a row that a program holds
MOST_ROWS = 4  # of the weight in a program
SMALL, LARGEST = 1 << 21, 1 << 25  # elements of a weight

_fast_norm = FastKernel(add_norm_kernel)
_fast_norm_linear = FastKernel(add_norm_linear_kernel)


def add_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor] | None:
    """x and residual [..., K], scale [K] -> the norm of their sum, and the sum, both [..., K]; None if not `normalises`.

    Launched early: no kernel that is still running may write the scale.
    """
    length = x.shape[-1]
    if not normalises(x, residual, scale):
        return None
    first, second = x.reshape(-1, length), residual.reshape(-1, length)  # views, unless their rows lie in no order
    normed, total = x.new_empty(x.shape), x.new_empty(x.shape)
    early = machine_of(x.device).early
    block = power_of_2(length)
    options = {"num_warps": 4 if block <= 2048 else 8 if block <= 8192 else 16, "launch_pdl": early}
    key = (x.dtype, scale.dtype, length, first.stride(0) % 16 == 0, second.stride(0) % 16 == 0)
    arguments = (first, second, scale, normed, total, length, first.stride(0), second.stride(0), eps, offset)
    _fast_norm(key, (first.shape[0], 1), arguments, {"BLOCK": block, "EARLY": early}, options, device_index(x.device))
    return normed, total


def add_norm_linear(
    x: Tensor, residual: Tensor, scale: Tensor, eps: float, offset: float, weight: Tensor, bias: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """x and residual [..., K] of one row, scale [K], weight [N, K], bias [N] or None -> the product [..., N], the norm [..., K] if `keep`,
    else [0], and the sum [..., K]; None if the sizes do not fit.

    Launched early: no kernel that is still running may write scale or weight.
    """
    if not (_gains(*weight.shape) and fits(x, weight) and normalises(x, residual, scale) and x.dtype == weight.dtype):
        return None
    count, length, bias = *weight.shape, unit_last(bias)
    out, total, normed = x.new_empty((*x.shape[:-1], count)), x.new_empty(x.shape), x.new_empty(x.shape if keep else 0)
    blocks = _blocks(count, length)
    early = machine_of(x.device).early
    constants = {
        "BLOCK_N": blocks.rows, "BLOCK_K": blocks.block, "REST_K": blocks.rest, "HAS_BIAS": bias is not None, "KEEP": keep, "EARLY": early,
    }  # fmt: skip
    options = {"num_warps": blocks.warps, "launch_pdl": early}
    key = (x.dtype, scale.dtype, count, length, weight.stride(0), None if bias is None else bias.dtype, keep)
    arguments = (
        x, residual, scale, weight, weight if bias is None else bias, out, normed if keep else total, total, count, length,
        weight.stride(0), eps, offset,
    )  # fmt: skip
    _fast_norm_linear(key, (triton.cdiv(count, blocks.rows), 1), arguments, constants, options, device_index(x.device))
    return out, normed, total


def normalises(x: Tensor, residual: Tensor, scale: Tensor) -> bool:
    """Whether the kernels support this dtype and size."""
    one_dtype = x.dtype == residual.dtype and x.dtype in DTYPES and scale.dtype in DTYPES
    in_order = all(each.stride(-1) == 1 for each in (x, residual, scale))
    return one_dtype and in_order and x.shape == residual.shape and x.shape[-1] <= LONGEST and x.numel() > 0


@functools.cache
def _gains(count: int, length: int) -> bool:
    """Whether a product of this size is the place for a norm: each of its programs has the whole row to add up before it multiplies.

    us that a norm adds to a product, as a launch of its own and within it (H200, bf16): 128 x 2,048 1.1, 0.2; 32 x 2,880 1.0, 0.0;
    5,120 x 2,048 1.4, 0.3; 11,264 x 2,048 0.9, -1.1; 6,144 x 4,096 1.3, 0.6. But 28,672 x 4,096 1.4, 1.0; 151,936 x 2,048 1.3, 1.3; and,
    in two blocks, 5,120 x 2,880 1.5, 1.1; 201,088 x 2,880 1.2, 33.
    """
    return count * length <= (LARGEST if row_blocks(count, length).rest == 0 else SMALL)


@functools.cache
def _blocks(count: int, length: int) -> Blocks:
    """More of the weight for each program than without a norm. Of the sizes above, us with one row of 4,096 and eight warps, two and four,
    four and four: 5,120 x 2,048 4.8, 0.7, 0.3; 6,144 x 4,096 7.7, 2.1, 0.6."""
    blocks = row_blocks(count, length)
    rows = max(min(MOST_ROWS, MOST_ROWS * PROGRAM_ELEMENTS // blocks.block), 1)
    return Blocks(rows, blocks.block, blocks.rest, warps=4 if blocks.block <= PROGRAM_ELEMENTS else 8)
