"""One row times a weight, limited only by reading the weight.

Each program holds whole rows of the weight in its registers, and requests them before it waits for the previous kernel, so that weights
arrive while that one ends (CUDA programming guide, "Programmatic Dependent Launch and Synchronization"). Sums are in float32.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.linear.gemv_kernel import one_row_kernel
from paged_attn.backends.machine import machine_of, power_of_2
from paged_attn.backends.unit_stride import unit_last

LONGEST_ROW = 32768  # bytes; longest weight row that a program can hold
PROGRAM_ELEMENTS = 4096  # fewest elements of the weight per program, so that enough loads are in flight
NUM_WARPS = 8  # a decode step takes 0.6 % less than with 4, also for programs of 8 KiB
# A row that fills less than two thirds of a block of at most LONGEST_SPARSE elements shares its program with another one. H200, TB/s of
# 131,072 rows of bf16, one and two at a time: 2,304 elements 3.22, 3.54; 5,120 elements 3.49, 4.51; but 2,880 3.90, 3.86; 3,840 4.54, 4.37.
LONGEST_SPARSE = 8192
_fast_one_row = FastKernel(one_row_kernel)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel supports this dtype and size."""
    long = power_of_2(weight.shape[1]) * weight.itemsize > LONGEST_ROW
    return weight.is_floating_point() and 2 <= weight.itemsize <= 4 and weight.stride(1) == 1 and x.stride(-1) == 1 and not long


def one_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """x [..., K] of one row, weight [N, K], bias [N] or None -> [..., N] of `dtype` (default: x's); None if not `fits`.

    Launched early: no kernel that is still running may write the weight.
    """
    if not fits(x, weight):
        return None
    count, length, bias = *weight.shape, unit_last(bias)
    out = x.new_empty((*x.shape[:-1], count), dtype=dtype)
    block_k = power_of_2(length)
    block_n = _rows_of_a_program(length, block_k)
    early = machine_of(x.device).early
    constants = {"BLOCK_N": block_n, "BLOCK_K": block_k, "HAS_BIAS": bias is not None, "EARLY": early}
    options = {"num_warps": NUM_WARPS, "launch_pdl": early}
    key = (weight.dtype, out.dtype, count, length, weight.stride(0), None if bias is None else bias.dtype)
    arguments = (x, weight, weight if bias is None else bias, out, count, length, weight.stride(0))
    _fast_one_row(key, (triton.cdiv(count, block_n), 1), arguments, constants, options, device_index(x.device))
    return out


def _rows_of_a_program(length: int, block_k: int) -> int:
    rows = max(PROGRAM_ELEMENTS // block_k, 1)
    return 2 * rows if 3 * length < 2 * block_k <= 2 * LONGEST_SPARSE else rows
