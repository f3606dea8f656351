"""Prompts under the delta rule with a separate decay for each channel of the keys (Kimi Delta Attention).

The share of token j's contribution that is left at token i is exp(G[i] - G[j]) in each channel, with G the sums of the logarithms. Split
into two factors it would overflow where decays are strong: `attn_ops/scans/kda.py` says how that is avoided.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.scans.triton.prompts_kernel import _dot, _kept, _solved, _tile, _tokens, _unit, _write_values


@triton.jit
def sum_decays(
    g, sums, chunks, g_row, g_head, g_dim, HEADS: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """`sums` [N * CHUNK, HEADS, K]: sums of g [T, HEADS, K] from the start of each chunk to each of its tokens."""
    chunk, head, i, k = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    row, there = _tokens(chunks, chunk, i)
    total = tl.cumsum(_tile(g + head * g_head, row, there, k, g_row, g_dim, K).to(tl.float32), 0)
    tl.store(sums + ((chunk * CHUNK + i) * HEADS + head)[:, None] * K + k[None], total, mask=(k < K)[None])


@triton.jit
def solve_by_channel(
    query, key, value, sums, beta, chunks, new, reads, scores, q_row, q_head, q_dim, k_row, k_head, k_dim, v_row, v_head, v_dim,
    beta_row, beta_head, eps,
    REPEATS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NORMALISE: tl.constexpr, CHUNK: tl.constexpr,
    PART: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """`new` and `reads` as in `solve_chunks`; `scores` [N * CHUNK, HEADS, CHUNK]: how much each query reads of what each token wrote."""
    chunk, head, i, k = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    row, there = _tokens(chunks, chunk, i)
    first = chunk * CHUNK
    place = (first + i) * HEADS + head
    query, key = query + head // REPEATS * q_head, key + head // REPEATS * k_head
    queries = _tile(query, row, there, k, q_row, q_dim, K).to(tl.float32)
    keys = _tile(key, row, there, k, k_row, k_dim, K).to(tl.float32)
    total = tl.load(sums + place[:, None] * K + k[None], mask=(k < K)[None], other=0.0)
    written, read = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for begin in tl.static_range(PART, CHUNK, PART):  # a part's tokens and earlier ones: both factors relative to the sum before the part
        start = tl.load(sums + ((first + begin - 1) * HEADS + head) * K + k, mask=k < K, other=0.0)[None]
        left = keys * tl.exp(tl.where((i < begin)[:, None], start - total, float("-inf")))
        grown = tl.exp(tl.where(((i >= begin) & (i < begin + PART))[:, None], total - start, float("-inf")))
        written += _dot(keys * grown, tl.trans(left), NARROW)
        read += _dot(queries * grown, tl.trans(left), NARROW)
    begin = i // PART * PART
    for column in range(PART):  # within the parts: one column of all of them at a time, from differences
        within = begin + column
        other = first + within
        row_of_other, is_there = _tokens(chunks, chunk, within)
        before = tl.load(sums + (other * HEADS + head)[:, None] * K + k[None], mask=(k < K)[None], other=0.0)
        left = tl.exp(tl.where((i >= within)[:, None], total - before, float("-inf")))
        left *= _tile(key, row_of_other, is_there, k, k_row, k_dim, K).to(tl.float32)
        here = i[None] == within[:, None]
        written = tl.where(here, tl.sum(keys * left, 1)[:, None], written)
        read = tl.where(here, tl.sum(queries * left, 1)[:, None], read)
    factor = _unit(keys, eps, NORMALISE)
    learned = tl.load(beta + row * beta_row + head * beta_head, mask=there, other=0.0).to(tl.float32)
    tl.store(scores + place[:, None] * CHUNK + i[None], (read * factor[None]).to(scores.dtype.element_ty))
    solved = _solved(tl.where(i[:, None] > i[None], written * (factor * learned)[:, None] * factor[None], 0.0), i, CHUNK)
    taken = _dot(solved * (factor * learned)[None], keys * tl.exp(total), NARROW)
    tl.store(reads + place[:, None] * K + k[None], taken.to(reads.dtype.element_ty), mask=(k < K)[None])
    _write_values(solved * learned[None], value + head * v_head, new, row, there, place, v_row, v_dim, V, BLOCK_V, NARROW)


@triton.jit
def scan_by_channel(
    query, key, sums, new, reads, scores, output, states, slots, continues, requests, chunks, q_row, q_head, q_dim, k_row, k_head, k_dim,
    output_row, slot_stride, state_head, state_k, state_v, scale, eps,
    REPEATS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NORMALISE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """`scan_chunks` on the results of `solve_by_channel`."""
    request, head, v = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    i, k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    first, count = tl.load(requests + request), tl.load(requests + tl.num_programs(0) + request)
    held = (k < K)[:, None] & (v < V)[None]
    state = states + head * state_head + k[:, None] * state_k + v[None] * state_v
    before = state + tl.load(slots + request).to(tl.int64) * slot_stride
    now = tl.load(before, mask=held & tl.load(continues + request), other=0.0).to(tl.float32)
    arguments = (query + head // REPEATS * q_head, key + head // REPEATS * k_head, sums, new, reads, scores, chunks)
    strides = (q_row, q_dim, k_row, k_dim)
    loaded = _chunk(arguments, strides, first, first + count, head, i, k, v, HEADS, K, V, CHUNK)
    for chunk in range(first, first + count):
        row, there, slot, queries, keys, total, last, written, read, score = loaded
        # The next chunk is loaded while this one is computed.
        loaded = _chunk(arguments, strides, chunk + 1, first + count, head, i, k, v, HEADS, K, V, CHUNK)
        writes = written.to(tl.float32) - _dot(read, now, NARROW)
        result = _dot(queries.to(tl.float32) * tl.exp(total), now, NARROW) + _dot(score, writes, NARROW)
        result *= (_unit(queries, eps, NORMALISE) * scale)[:, None]
        out = output + row[:, None] * output_row + head * V + v[None]
        tl.store(out, result.to(output.dtype.element_ty), mask=there[:, None] & (v < V)[None])
        left = keys.to(tl.float32) * tl.exp(last[None] - total)
        now = now * tl.exp(last)[:, None] + _dot(tl.trans(left), writes * _unit(keys, eps, NORMALISE)[:, None], NARROW)
        now = _kept(now, state, slot * slot_stride, slot > 0, held)


@triton.jit
def _chunk(
    arguments, strides, chunk, end, head, i, k, v, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Everything that `scan_by_channel` reads of a chunk, and the slot of the state after it; zeros from `end` on."""
    query, key, sums, new, reads, scores, chunks = arguments
    q_row, q_dim, k_row, k_dim = strides
    real = chunk < end
    row = tl.load(chunks + 3 * chunk, mask=real, other=0) + i
    there = i < tl.load(chunks + 3 * chunk + 1, mask=real, other=0)
    slot = tl.load(chunks + 3 * chunk + 2, mask=real, other=0)
    place = ((chunk * CHUNK + i) * HEADS + head)[:, None]
    total = tl.load(sums + place * K + k[None], mask=real & (k < K)[None], other=0.0)
    last = tl.load(sums + ((chunk * CHUNK + CHUNK - 1) * HEADS + head) * K + k, mask=real & (k < K), other=0.0)
    written = tl.load(new + place * V + v[None], mask=real & (v < V)[None], other=0.0)
    read = tl.load(reads + place * K + k[None], mask=real & (k < K)[None], other=0.0)
    score = tl.load(scores + place * CHUNK + i[None], mask=real, other=0.0)
    queries, keys = _tile(query, row, there, k, q_row, q_dim, K), _tile(key, row, there, k, k_row, k_dim, K)
    return row, there, slot, queries, keys, total, last, written, read, score
