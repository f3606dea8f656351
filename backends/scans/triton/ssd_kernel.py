"""A scan of Mamba-2 through prompts (Dao and Gu 2024, "Transformers are SSMs", section 6): first the states between chunks, in one loop
over the chunks of each request; then the outputs of the tokens of all chunks at once."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.scans.triton.prompts_kernel import _decay, _dot, _kept, _tile


@triton.jit
def chunk_states(
    x, step, decay, b, before, states, slots, continues, requests, chunks, x_row, x_head, x_dim, step_row, step_head, decay_row, decay_head,
    b_row, b_group, b_dim, slot_stride, state_head, state_p, state_n,
    REPEATS: tl.constexpr, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Takes a part of a head's state [P, N] through a request; `before` [chunks, HEADS, N, P] gets the state before each chunk.

    `requests` [2, E] and `chunks` [.., 3] are `Extends.bounds`; `step` and the logarithms of the `decay` [T, HEADS] are float32.
    """
    request, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = part % tl.cdiv(N, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = part // tl.cdiv(N, BLOCK_N) * BLOCK_P + tl.arange(0, BLOCK_P)
    i, first, count = tl.arange(0, CHUNK), tl.load(requests + request), tl.load(requests + tl.num_programs(0) + request)
    held = (n < N)[:, None] & (p < P)[None]
    state = states + head * state_head + n[:, None] * state_n + p[None] * state_p
    stored = state + tl.load(slots + request).to(tl.int64) * slot_stride
    now = tl.load(stored, mask=held & tl.load(continues + request), other=0.0).to(tl.float32)
    arguments = (x + head * x_head, step + head * step_head, decay + head * decay_head, b + head // REPEATS * b_group, chunks)
    strides = (x_row, x_dim, step_row, decay_row, b_row, b_dim)
    loaded = _chunk(arguments, strides, first, first + count, i, p, n, P, N)
    for chunk in range(first, first + count):
        slot, values, keys, taken, log_decay = loaded
        loaded = _chunk(arguments, strides, chunk + 1, first + count, i, p, n, P, N)  # loaded while this one is computed
        at = before + (chunk * HEADS + head) * N * P + n[:, None] * P + p[None]
        tl.store(at, now.to(before.dtype.element_ty), mask=held)
        last = tl.sum(log_decay, 0)
        weight = taken * tl.exp(last - tl.cumsum(log_decay, 0))
        now = now * tl.exp(last) + _dot(tl.trans(keys), values.to(tl.float32) * weight[:, None], NARROW)
        now = _kept(now, state, slot * slot_stride, slot > 0, held)


@triton.jit
def _chunk(arguments, strides, chunk, end, i, p, n, P: tl.constexpr, N: tl.constexpr):
    """Everything that `chunk_states` reads of a chunk, and the slot of the state after it; zeros from `end` on."""
    x, step, decay, b, chunks = arguments
    x_row, x_dim, step_row, decay_row, b_row, b_dim = strides
    real = chunk < end
    row = tl.load(chunks + 3 * chunk, mask=real, other=0) + i
    there = i < tl.load(chunks + 3 * chunk + 1, mask=real, other=0)
    slot = tl.load(chunks + 3 * chunk + 2, mask=real, other=0)
    taken = tl.load(step + row * step_row, mask=there, other=0.0)
    log_decay = tl.load(decay + row * decay_row, mask=there, other=0.0)
    return slot, _tile(x, row, there, p, x_row, x_dim, P), _tile(b, row, there, n, b_row, b_dim, N), taken, log_decay


@triton.jit
def chunk_outputs(
    x, step, decay, b, c, before, output, chunks, x_row, x_head, x_dim, step_row, step_head, decay_row, decay_head, b_row, b_group, b_dim,
    c_row, c_group, c_dim, output_row,
    REPEATS: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr, P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """What a chunk's tokens read of the state before it and of each other, for TOGETHER heads with the same b and c."""
    part, chunk, i = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, CHUNK)
    head = part // tl.cdiv(P, BLOCK_P) * TOGETHER
    p = part % tl.cdiv(P, BLOCK_P) * BLOCK_P + tl.arange(0, BLOCK_P)
    row, there = tl.load(chunks + 3 * chunk) + i, i < tl.load(chunks + 3 * chunk + 1)
    query, key = c + head // REPEATS * c_group, b + head // REPEATS * b_group
    alike = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in tl.static_range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        queries = _tile(query, row, there, n, c_row, c_dim, N)
        alike += _dot(queries, tl.trans(_tile(key, row, there, n, b_row, b_dim, N)), NARROW)
    until, shown = i[:, None] >= i[None], there[:, None] & (p < P)[None]
    for _ in range(TOGETHER):
        total = tl.cumsum(tl.load(decay + row * decay_row + head * decay_head, mask=there, other=0.0), 0)
        taken = tl.load(step + row * step_row + head * step_head, mask=there, other=0.0)
        values = _tile(x + head * x_head, row, there, p, x_row, x_dim, P).to(tl.float32) * taken[:, None]
        result = tl.zeros([CHUNK, BLOCK_P], tl.float32)
        for first in tl.static_range(0, N, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            if BLOCK_N < N:
                queries = _tile(query, row, there, n, c_row, c_dim, N)
            at = before + (chunk * HEADS + head) * N * P + n[:, None] * P + p[None]
            state = tl.load(at, mask=(n < N)[:, None] & (p < P)[None], other=0.0)
            result += _dot(queries, state, NARROW)
        result = result * tl.exp(total)[:, None] + _dot(alike * _decay(total, until), values, NARROW)
        tl.store(output + row[:, None] * output_row + head * P + p[None], result.to(output.dtype.element_ty), mask=shown)
        head += 1
