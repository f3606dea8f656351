"""Launches the kernels of Mamba-2, and of linear attention with one decay per head, for all requests with more than one new token."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_attn.attn_ops.scans.state_rows import Extends
from paged_attn.backends.fast_launch import keyed_launch
from paged_attn.backends.machine import blocks_of, power_of_2
from paged_attn.backends.scans.triton.prompts import COLUMNS, NARROW, WIDE_COLUMNS
from paged_attn.backends.scans.triton.ssd_kernel import chunk_outputs, chunk_states

CHUNK = 64  # tokens
WIDE_CHUNK = 32  # for products in float32
WHOLE = 256  # elements of a channel's state that a program holds whole
TOO_SMALL = (torch.float16,)  # states, and products with them, are unbounded
TOGETHER = 16  # most heads that share the products of their queries and keys


def mamba2(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, low: float, high: float, states: Tensor, extends: Extends
) -> bool:
    """Computes `mamba2_extend`; always True."""
    step = dt.clamp(low, high).float()
    _scan(x, step, step * a.float(), b, c, output, states, extends)
    return True


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, output: Tensor, before: bool, states: Tensor, extends: Extends
) -> bool:
    """Computes `linear_attention_extend`; False if each channel of the keys has a decay, or queries read the state before their token."""
    if before or g.dim() == 3:
        return False
    decay = g.float()
    _scan(value, decay.new_ones(()).expand_as(decay), decay, key, query, output, states.transpose(-1, -2), extends)
    return True


def _scan(x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, output: Tensor, states: Tensor, extends: Extends) -> None:
    """S = exp(decay) S + step x b^T; output = S c: with float32 step and decay [T, H], and states [slots, H, P, N] of any strides."""
    _, heads, p_dim, n_dim = states.shape
    repeats, narrow = heads // b.shape[1], None if x.dtype in TOO_SMALL else NARROW.get(x.dtype)
    sizes = Sizes.of(p_dim, n_dim, narrow)
    requests, chunks = extends.bounds(sizes.chunk)
    before = torch.empty(len(chunks), heads, n_dim, p_dim, dtype=torch.float32 if narrow is None else x.dtype, device=x.device)
    constants = {"REPEATS": repeats, "HEADS": heads, "P": p_dim, "N": n_dim, "BLOCK_P": sizes.block_p, "NARROW": narrow}
    of_values = *x.stride(), *step.stride(), *decay.stride(), *b.stride()
    keyed_launch(
        chunk_states, (len(extends.lengths), heads, blocks_of(n_dim, sizes.states_n) * blocks_of(p_dim, sizes.block_p)),
        x, step, decay, b, before, states, extends.slots_on_device, extends.continues, requests, chunks, *of_values, *states.stride(),
        CHUNK=sizes.chunk, BLOCK_N=sizes.states_n, **constants,
    )  # fmt: skip
    together = math.gcd(repeats, TOGETHER)
    keyed_launch(
        chunk_outputs, (heads // together * blocks_of(p_dim, sizes.block_p), len(chunks)),
        x, step, decay, b, c, before, output, chunks, *of_values, *c.stride(), output.stride(0), TOGETHER=together,
        CHUNK=sizes.chunk, BLOCK_N=sizes.outputs_n, num_stages=sizes.stages, **constants,
    )  # fmt: skip


class Sizes(NamedTuple):
    """What a program multiplies at once: tokens of a chunk; channels of a head; elements of each channel's state, in `chunk_states` and in
    `chunk_outputs`."""

    chunk: int
    block_p: int
    states_n: int
    outputs_n: int
    stages: int

    @classmethod
    def of(cls, p_dim: int, n_dim: int, narrow: Any) -> Sizes:
        if narrow is None:
            return cls(WIDE_CHUNK, _block(p_dim, 16, WIDE_COLUMNS), _block(n_dim, 16, COLUMNS), _block(n_dim, 16, WIDE_COLUMNS), 3)
        outputs_n = _block(n_dim, COLUMNS, WHOLE)
        stages = 3 if outputs_n < WHOLE else 2 if n_dim <= WHOLE else 1  # with more stages two parts would not fit at once
        return cls(CHUNK, COLUMNS, COLUMNS, outputs_n, stages)


def _block(size: int, least: int, most: int) -> int:
    return min(max(power_of_2(size), least), most)
