"""The most likely token of each row of logits, in two short kernels.

PyTorch's argmax reads a row with one block of threads, which for a vocabulary of 128,256 takes longer than the attention of three layers.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.machine import machine_of, power_of_2
from paged_attn.backends.sampling.greedy_kernel import best_of_part, best_of_row

PART = 2048  # logits per program
_fast_part, _fast_row = FastKernel(best_of_part), FastKernel(best_of_row)


def serves(logits: Tensor) -> bool:
    """Whether `greedy_sample` supports this dtype and layout."""
    return logits.dtype in (torch.float32, torch.bfloat16, torch.float16) and logits.stride(-1) == 1 and logits.numel() > 0


def greedy_sample(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """logits [N, V] -> [N] int64, in `out` if given: the first of the largest (NaN counts as largest); -1 if that is not finite."""
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, PART)
    keys = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    early, device = machine_of(logits.device).early, device_index(logits.device)
    options = {"num_warps": 4, "launch_pdl": early}
    stride = logits.stride(0)
    constants = {"PART": PART, "EARLY": early}
    _fast_part(
        (logits.dtype, vocabulary, stride, parts), (rows, parts), (logits, keys, vocabulary, stride, parts), constants, options, device
    )
    _fast_row((parts,), (rows, 1), (keys, tokens, parts), {"PARTS": power_of_2(parts), "EARLY": early}, options, device)
    return tokens
