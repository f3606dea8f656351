"""Launches the kernels of prompts, and of all requests with more than one new token: the delta rules, Mamba-1 and single numbers."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from paged_attn.attn_ops.scans.gated_delta import EPS
from paged_attn.attn_ops.scans.state_rows import Extends
from paged_attn.backends.fast_launch import keyed_launch
from paged_attn.backends.machine import blocks_of, power_of_2
from paged_attn.backends.scans.triton.kda_kernel import scan_by_channel, solve_by_channel, sum_decays
from paged_attn.backends.scans.triton.prompts_kernel import scan_channels, scan_chunks, scan_numbers, solve_chunks

MOST = 256  # largest state dimension that a program holds whole
CHUNK = 32  # tokens, solved one after the other
WIDE_CHUNK = 16  # for products in float32, which take twice the registers
WIDE_COLUMNS = 32  # columns of a state per program, where products are in float32
COLUMNS = 64  # Trap: of 16 bits not fewer: on Hopper, Triton 3.6 multiplies matrices of 16 and 32 columns
# wrongly, or reads past its shared memory (triton#11366); tests/gpu/test_scans.py has the widths that showed it
TOKENS = 32  # Mamba-1 tokens that are combined at once
NUMBERS = 2048  # (token, channel, state) decays per program
SINGLE = 64  # channels of single numbers per program

NARROW = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # operands of products; sums and states are float32
PART = 16  # tokens within which decays are computed as differences


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, states: Tensor, extends: Extends
) -> bool:
    """Computes `gated_delta_extend`; False if keys are longer than a program can hold."""
    _, heads, k_dim, v_dim = states.shape
    if k_dim > MOST:
        return False
    size, block_k, block_v, narrow = sizes(k_dim, v_dim, value.dtype)
    where = _where(extends, size)
    chunks = where[-1]
    new = torch.empty(len(chunks) * size, heads, v_dim, dtype=value.dtype, device=value.device)
    reads = torch.empty(len(chunks) * size, heads, k_dim, dtype=value.dtype, device=value.device)
    keyed_launch(
        solve_chunks, (len(chunks), heads),
        key, value, g, beta, chunks, new, reads, *key.stride(), *value.stride(), *g.stride(), *beta.stride(), EPS,
        REPEATS=heads // key.shape[1], HEADS=heads, K=k_dim, V=v_dim, NORMALISE=normalise, CHUNK=size, BLOCK_K=block_k, BLOCK_V=block_v,
        NARROW=narrow,
    )  # fmt: skip
    keyed_launch(
        scan_chunks, (len(extends.lengths), heads, blocks_of(v_dim, block_v)),
        query, key, g, new, reads, output, states, *where, *query.stride(), *key.stride(), *g.stride(), output.stride(0),
        *states.stride(), k_dim**-0.5, EPS, REPEATS=heads // key.shape[1], HEADS=heads, K=k_dim, V=v_dim, NORMALISE=normalise, CHUNK=size,
        BLOCK_K=block_k, BLOCK_V=block_v, NARROW=narrow, num_stages=1, num_warps=8,
    )  # fmt: skip
    return True


def mamba1(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, states: Tensor, extends: Extends) -> bool:
    """Computes `mamba1_extend`; False if a channel's state is larger than a program can hold."""
    _, channels, n_dim = states.shape
    block_n = power_of_2(n_dim)
    block_c = NUMBERS // (TOKENS * block_n)
    if not block_c:
        return False
    keyed_launch(
        scan_channels, (len(extends.lengths), blocks_of(channels, block_c)),
        x, dt, a, b, c, output, states, *_where(extends, TOKENS), *x.stride(), *dt.stride(), *a.stride(), *b.stride(), *c.stride(),
        output.stride(0), states.stride(0), C=channels, N=n_dim, BLOCK_T=TOKENS, BLOCK_C=block_c, BLOCK_N=block_n,
    )  # fmt: skip
    return True


def channels(decay: Tensor, x: Tensor, output: Tensor, maximum: bool, initial: float, states: Tensor, extends: Extends) -> bool:
    """Computes `channel_scan_extend`."""
    count = states.shape[1]
    keyed_launch(
        scan_numbers, (len(extends.lengths), blocks_of(count, SINGLE)),
        decay, x, output, states, *_where(extends, TOKENS), *decay.stride(), *x.stride(), output.stride(0), states.stride(0), initial,
        C=count, MAXIMUM=maximum, BLOCK_T=TOKENS, BLOCK_C=SINGLE,
    )  # fmt: skip
    return True


def _where(extends: Extends, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which states the requests continue, and where their chunks are."""
    return extends.slots_on_device, extends.continues, *extends.bounds(size)


def sizes(k_dim: int, v_dim: int, dtype: torch.dtype) -> tuple[int, int, int, Any]:
    """For the delta rule: tokens of a chunk, how much of a state's two dimensions a program holds, and the dtype of products."""
    narrow = NARROW.get(dtype)
    least = 16 if narrow is None else COLUMNS  # the minimum for products is 16
    columns = WIDE_COLUMNS if narrow is None else COLUMNS
    block_k, block_v = (max(power_of_2(size), least) for size in (k_dim, min(v_dim, columns)))
    return WIDE_CHUNK if narrow is None else CHUNK, block_k, block_v, narrow


def kda(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, states: Tensor, extends: Extends
) -> bool:
    """Computes `kda_extend`; False if keys are longer than a program can hold."""
    _, heads, k_dim, v_dim = states.shape
    if k_dim > MOST:
        return False
    size, block_k, block_v, narrow = sizes(k_dim, v_dim, value.dtype)
    where = _where(extends, size)
    chunks = where[-1]
    count = len(chunks)

    def made(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count * size, heads, width, dtype=dtype, device=value.device)

    sums, new, reads, scores = made(k_dim, torch.float32), *(made(width, value.dtype) for width in (v_dim, k_dim, size))
    of_keys: dict[str, Any] = {"HEADS": heads, "K": k_dim, "CHUNK": size, "BLOCK_K": block_k}
    constants = {"REPEATS": heads // key.shape[1], "V": v_dim, "NORMALISE": normalise, "BLOCK_V": block_v, "NARROW": narrow, **of_keys}
    keyed_launch(sum_decays, (count, heads), g, sums, chunks, *g.stride(), **of_keys)
    keyed_launch(
        solve_by_channel, (count, heads),
        query, key, value, sums, beta, chunks, new, reads, scores, *query.stride(), *key.stride(), *value.stride(),
        *beta.stride(), EPS, PART=PART, **constants,
    )  # fmt: skip
    keyed_launch(
        scan_by_channel, (len(extends.lengths), heads, blocks_of(v_dim, block_v)),
        query, key, sums, new, reads, scores, output, states, *where, *query.stride(), *key.stride(),
        output.stride(0), *states.stride(), k_dim**-0.5, EPS, num_stages=1, num_warps=8, **constants,
    )  # fmt: skip
    return True
