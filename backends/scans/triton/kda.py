"""Launches the kernels of Kimi Delta Attention for prompts, and for all requests with more than one new token."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from paged_attn.attn_ops.scans.gated_delta import EPS
from paged_attn.attn_ops.scans.state_rows import Extends
from paged_attn.backends.compiling.compile_ahead import launch
from paged_attn.backends.scans.triton.kda_kernel import scan_by_channel, solve_by_channel, sum_decays
from paged_attn.backends.scans.triton.prompts import MOST, sizes

PART = 16  # tokens within which decays are computed as differences


def kda(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, states: Tensor, extends: Extends
) -> bool:
    """Computes `kda_extend`; False if keys are longer than a program can hold."""
    _, heads, k_dim, v_dim = states.shape
    if k_dim > MOST:
        return False
    size, block_k, block_v, narrow = sizes(k_dim, v_dim, value.dtype)
    chunks, where = extends.chunks(size), extends.bounds(size)
    count = len(chunks.rows)

    def made(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count * size, heads, width, dtype=dtype, device=value.device)

    sums, new, reads, scores = made(k_dim, torch.float32), *(made(width, value.dtype) for width in (v_dim, k_dim, size))
    of_keys: dict[str, Any] = {"HEADS": heads, "K": k_dim, "CHUNK": size, "BLOCK_K": block_k}
    constants = {"REPEATS": heads // key.shape[1], "V": v_dim, "NORMALISE": normalise, "BLOCK_V": block_v, "NARROW": narrow, **of_keys}
    launch(sum_decays, (count, heads), g, sums, chunks.rows, chunks.real, *g.stride(), **of_keys)
    launch(
        solve_by_channel, (count, heads),
        query, key, value, sums, beta, chunks.rows, chunks.real, new, reads, scores, *query.stride(), *key.stride(), *value.stride(),
        *beta.stride(), EPS, PART=PART, **constants,
    )  # fmt: skip
    launch(
        scan_by_channel, (len(extends.lengths), heads, triton.cdiv(v_dim, block_v)),
        query, key, sums, new, reads, scores, output, states, extends.slots_on_device, extends.continues, *where, *query.stride(),
        *key.stride(), output.stride(0), *states.stride(), k_dim**-0.5, EPS, num_stages=1, num_warps=8, **constants,
    )  # fmt: skip
    return True
