"""One row times a weight, limited only by reading the weight.

Each program holds whole rows of the weight in its registers. It requests them before it waits for the previous kernel, so they arrive
while that one ends (CUDA programming guide, "Programmatic Dependent Launch and Synchronization"). Sums are in float32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.linear.gemv_kernel import one_row_kernel
from paged_attn.backends.machine import machine_of, power_of_2
from paged_attn.backends.unit_stride import unit_last

LONGEST_ROW = 40960  # bytes; longest weight row that a program can hold
LONG = 16384  # elements; of longer rows that have a rest, a program takes one
HEAD = 1 << 28  # elements of a weight, and more
PROGRAM_ELEMENTS = 4096  # fewest elements of the weight per program, so that enough loads are in flight


class Blocks(NamedTuple):
    """How a program holds rows of the weight: each in a block of a power of 2, and what that does not hold in a smaller one (or 0)."""

    rows: int
    block: int
    rest: int
    warps: int


_fast_one_row = FastKernel(one_row_kernel)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel supports this dtype and size."""
    blocks = row_blocks(*weight.shape)
    long = (blocks.block + blocks.rest) * weight.itemsize > LONGEST_ROW
    return weight.is_floating_point() and 2 <= weight.itemsize <= 4 and weight.stride(1) == 1 and x.stride(-1) == 1 and not long


def one_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """x [..., K] of one row, weight [N, K], bias [N] or None -> [..., N] of `dtype` (default: x's); None if not `fits`.

    Launched early: no kernel that is still running may write the weight.
    """
    if not fits(x, weight):
        return None
    count, length, bias = *weight.shape, unit_last(bias)
    out = x.new_empty((*x.shape[:-1], count), dtype=dtype)
    blocks = row_blocks(count, length)
    early = machine_of(x.device).early
    constants = {"BLOCK_N": blocks.rows, "BLOCK_K": blocks.block, "REST_K": blocks.rest, "HAS_BIAS": bias is not None, "EARLY": early}
    options = {"num_warps": blocks.warps, "launch_pdl": early}
    key = (weight.dtype, out.dtype, count, length, weight.stride(0), None if bias is None else bias.dtype)
    arguments = (x, weight, weight if bias is None else bias, out, count, length, weight.stride(0))
    _fast_one_row(key, (triton.cdiv(count, blocks.rows), 1), arguments, constants, options, device_index(x.device))
    return out


@functools.cache
def row_blocks(count: int, length: int) -> Blocks:
    """For a weight [count, length].

    TB/s on an H200, bf16. One block and two, products of 56 MB in a row: 2,304 elements 3.20, 3.65; 2,880 3.37, 3.72; 5,120 3.37, 3.70;
    11,008 3.44, 3.64; of 12 MB, where starting counts more: 2.40, 2.79; 2.58, 2.79; 2.21, 2.86; 2.20, 2.89. Two rows and four of a head:
    201,088 x 2,880 3.96, 4.59; 163,840 x 2,304 4.56, 4.54; 202,048 x 5,120 4.64, 4.64.
    """
    whole = power_of_2(length)
    half = whole // 2
    rest = max(power_of_2(length - half), 16)
    if length == whole or rest >= half:  # two blocks would be as large as one
        return Blocks(max(PROGRAM_ELEMENTS // whole, 1), whole, 0, warps=8)  # a decode step takes 0.6 % less than with 4
    rows = 2 if length < LONG else 1
    while rows * (half + rest) <= PROGRAM_ELEMENTS:
        rows *= 2
    if count * length >= HEAD and length <= 2 * PROGRAM_ELEMENTS:
        rows = max(rows, 4)
    return Blocks(rows, half, rest, warps=4 if length <= 2 * PROGRAM_ELEMENTS else 8)
