"""Log-probabilities of rows of logits in two short kernels.

PyTorch writes and reads a row some fifteen times for them, as numbers of 8 bytes where ties are broken: for 128 rows of 128,256 that
takes 1.7 ms, a fifth of the step of the 8B model that computes them.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.machine import machine_of, power_of_2
from paged_attn.backends.sampling.logprobs_kernel import score_part, score_row

PART = 2048  # logits per program
MOST_LIKELY = 64  # tokens that may be asked for: each takes a pass over a part in registers
_fast_part, _fast_row = FastKernel(score_part), FastKernel(score_row)


def score_rows(logits: Tensor, rows: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities as `engine/sampling/sampler_output.py` defines them; a row's depend, bit for bit, only on that row.

    Args:
        logits: [N, V], with a dtype and layout that `greedy.serves`.
        rows, tokens: [L] int64; most: how many of the most likely tokens, 0 to MOST_LIKELY and V.

    Returns:
        own [L] float32, ranks [L] int64, ids [L, most] int64 and values [L, most] float32 of the most likely ones.
    """
    vocabulary, count, stride = logits.shape[1], len(rows), logits.stride(0)
    parts = triton.cdiv(vocabulary, PART)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    found = empty(torch.int64, count, parts, most), empty(torch.float32, count, parts, 2), empty(torch.int32, count, parts)
    scores = empty(torch.float32, count), empty(torch.int64, count), empty(torch.int64, count, most), empty(torch.float32, count, most)
    early, device = machine_of(logits.device).early, device_index(logits.device)
    options, key, numbers = {"num_warps": 4, "launch_pdl": early}, (logits.dtype, vocabulary, stride), (vocabulary, stride, parts, most)
    inputs = (logits, rows, tokens, *found)
    _fast_part(key, (count, parts), (*inputs, *numbers), {"PART": PART, "EARLY": early}, options, device)
    _fast_row(key, (count, 1), (*inputs, *scores, *numbers), {"PARTS": power_of_2(parts), "EARLY": early}, options, device)
    return scores
