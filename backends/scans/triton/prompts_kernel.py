"""Runs prompts through states of the delta rule, of Mamba-1 and of single numbers: each chunk's update is computed for all chunks at once,
and then one loop goes over the chunks of each request."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def solve_chunks(
    key, value, g, beta, chunks, new, reads, k_row, k_head, k_dim, v_row, v_head, v_dim, g_row, g_head, beta_row, beta_head, eps,
    REPEATS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NORMALISE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """The delta rule on a chunk of a head: `new` [N * CHUNK, H, V] and `reads` [N * CHUNK, H, K]. The chunk's tokens write new - reads S,
    where S is the state before the chunk. `chunks` [N, 3] is of `Extends.bounds`."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    row, there = _tokens(chunks, chunk, i)
    keys = _tile(key + (head // REPEATS) * k_head, row, there, k, k_row, k_dim, K)
    factor = _unit(keys, eps, NORMALISE)
    total = tl.cumsum(tl.load(g + row * g_row + head * g_head, mask=there, other=0.0).to(tl.float32), 0)
    learned = tl.load(beta + row * beta_row + head * beta_head, mask=there, other=0.0).to(tl.float32)
    before = i[:, None] > i[None]
    system = _dot(keys, tl.trans(keys), NARROW) * (_decay(total, before) * (factor * learned)[:, None] * factor[None])
    solved = _solved(system, i, CHUNK)
    place = (chunk * CHUNK + i) * HEADS + head
    read = _dot(solved * (factor * learned * tl.exp(total))[None], keys, NARROW)
    tl.store(reads + place[:, None] * K + k[None], read.to(reads.dtype.element_ty), mask=(k < K)[None])
    _write_values(solved * learned[None], value + head * v_head, new, row, there, place, v_row, v_dim, V, BLOCK_V, NARROW)


@triton.jit
def scan_chunks(
    query, key, g, new, reads, output, states, slots, continues, requests, chunks, q_row, q_head, q_dim, k_row, k_head, k_dim, g_row,
    g_head, output_row, slot_stride, state_head, state_k, state_v, scale, eps,
    REPEATS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NORMALISE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Takes some columns of a head's state [K, V] through a request under the delta rule: each chunk's queries read it, then its keys
    write it.

    `requests` [2, E] and `chunks` [N, 3] are `Extends.bounds`; `new` and `reads` are stored chunk by chunk.
    """
    request, head, v = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    i, k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    first, count = tl.load(requests + request), tl.load(requests + tl.num_programs(0) + request)
    held = (k < K)[:, None] & (v < V)[None]
    state = states + head * state_head + k[:, None] * state_k + v[None] * state_v
    before = state + tl.load(slots + request).to(tl.int64) * slot_stride
    now = tl.load(before, mask=held & tl.load(continues + request), other=0.0).to(tl.float32)
    until = i[:, None] >= i[None]
    arguments = (query + (head // REPEATS) * q_head, key + (head // REPEATS) * k_head, g + head * g_head, new, reads, chunks)
    strides = (q_row, q_dim, k_row, k_dim, g_row)
    loaded = _chunk(arguments, strides, first, first + count, head, i, k, v, HEADS, K, V, CHUNK)
    for chunk in range(first, first + count):
        row, there, slot, queries, keys, log_decay, written, read = loaded
        # The next chunk is loaded while this one is computed.
        loaded = _chunk(arguments, strides, chunk + 1, first + count, head, i, k, v, HEADS, K, V, CHUNK)
        query_factor, key_factor = _unit(queries, eps, NORMALISE), _unit(keys, eps, NORMALISE)
        total, last = tl.cumsum(log_decay, 0), tl.sum(log_decay, 0)
        writes = written.to(tl.float32) - _dot(read, now, NARROW)
        scores = _dot(queries, tl.trans(keys), NARROW) * _decay(total, until) * key_factor[None]
        result = _dot(queries, now, NARROW) * tl.exp(total)[:, None] + _dot(scores, writes, NARROW)
        out = output + row[:, None] * output_row + head * V + v[None]
        result *= (query_factor * scale)[:, None]
        tl.store(out, result.to(output.dtype.element_ty), mask=there[:, None] & (v < V)[None])
        writes *= (key_factor * tl.exp(last - total))[:, None]
        now = now * tl.exp(last) + _dot(tl.trans(keys), writes, NARROW)
        now = _kept(now, state, slot * slot_stride, slot > 0, held)


@triton.jit
def _chunk(
    arguments, strides, chunk, end, head, i, k, v, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Everything that `scan_chunks` reads of a chunk: its tokens, the slot of the state after it, its values; zeros from `end` on."""
    query, key, g, new, reads, chunks = arguments
    q_row, q_dim, k_row, k_dim, g_row = strides
    real = chunk < end
    row = tl.load(chunks + 3 * chunk, mask=real, other=0) + i
    there = i < tl.load(chunks + 3 * chunk + 1, mask=real, other=0)
    slot = tl.load(chunks + 3 * chunk + 2, mask=real, other=0)
    queries, keys = _tile(query, row, there, k, q_row, q_dim, K), _tile(key, row, there, k, k_row, k_dim, K)
    log_decay = tl.load(g + row * g_row, mask=there, other=0.0).to(tl.float32)
    place = ((chunk * CHUNK + i) * HEADS + head)[:, None]
    written = tl.load(new + place * V + v[None], mask=real & (v < V)[None], other=0.0)
    read = tl.load(reads + place * K + k[None], mask=real & (k < K)[None], other=0.0)
    return row, there, slot, queries, keys, log_decay, written, read


@triton.jit
def scan_channels(
    x, dt, a, b, c, output, states, slots, continues, requests, chunks, x_row, x_dim, dt_row, dt_dim, a_dim, a_state, b_row, b_dim, c_row,
    c_dim, output_row, slot_stride, C: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Takes some channels of a Mamba-1 state [C, N] through a request, BLOCK_T tokens at a time; `requests` and `chunks` as above."""
    request, channel, n = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    t, first, count = tl.arange(0, BLOCK_T), tl.load(requests + request), tl.load(requests + tl.num_programs(0) + request)
    held = (channel < C)[:, None] & (n < N)[None]
    state = states + channel[:, None] * N + n[None]
    before = state + tl.load(slots + request).to(tl.int64) * slot_stride
    now = tl.load(before, mask=held & tl.load(continues + request), other=0.0).to(tl.float32)
    rate = tl.load(a + channel[:, None] * a_dim + n[None] * a_state, mask=held, other=0.0).to(tl.float32)
    for chunk in range(first, first + count):
        row, there = tl.load(chunks + 3 * chunk) + t, t < tl.load(chunks + 3 * chunk + 1)
        step = _tile(dt, row, there, channel, dt_row, dt_dim, C).to(tl.float32)
        new = _tile(x, row, there, channel, x_row, x_dim, C).to(tl.float32) * step
        keys = _tile(b, row, there, n, b_row, b_dim, N).to(tl.float32)
        queries = _tile(c, row, there, n, c_row, c_dim, N).to(tl.float32)
        decay, added = tl.exp(step[:, :, None] * rate[None]), new[:, :, None] * keys[:, None]  # a token past the end keeps the state
        decay, added = tl.associative_scan((decay, added), 0, _joined)
        every = decay * now[None] + added
        out = output + row[:, None] * output_row + channel[None]
        result = tl.sum(every * queries[:, None], 2)
        tl.store(out, result.to(output.dtype.element_ty), mask=there[:, None] & (channel < C)[None])
        now = tl.sum(tl.where(t[:, None, None] == BLOCK_T - 1, every, 0.0), 0)
        slot = tl.load(chunks + 3 * chunk + 2)
        now = _kept(now, state, slot * slot_stride, slot > 0, held)


@triton.jit
def _tokens(chunks, chunk, i):
    """The rows of a chunk's tokens, and which of them are there."""
    return tl.load(chunks + 3 * chunk) + i, i < tl.load(chunks + 3 * chunk + 1)


@triton.jit
def _dot(one, other, NARROW: tl.constexpr):
    """The product, summed in float32; operands are rounded to NARROW, if that is a dtype."""
    if NARROW is None:
        return tl.dot(one.to(tl.float32), other.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(one.to(NARROW), other.to(NARROW))


@triton.jit
def _solved(system, i, CHUNK: tl.constexpr):
    """The inverse of 1 + system, row by row; system is zero on and above its diagonal."""
    solved = -system
    for last in range(1, CHUNK):
        found = tl.sum(tl.where(i[:, None] == last, solved, 0.0), 0)
        found += tl.sum(found[:, None] * tl.where(i[:, None] < last, solved, 0.0), 0)
        solved = tl.where(i[:, None] == last, found[None], solved)
    return solved + tl.where(i[:, None] == i[None], 1.0, 0.0)


@triton.jit
def _write_values(solved, value, new, row, there, place, v_row, v_dim, V: tl.constexpr, BLOCK_V: tl.constexpr, NARROW: tl.constexpr):
    """What the tokens of a chunk write if the state before it is empty."""
    for first in tl.static_range(0, V, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        written = _dot(solved, _tile(value, row, there, v, v_row, v_dim, V), NARROW)
        tl.store(new + place[:, None] * V + v[None], written.to(new.dtype.element_ty), mask=(v < V)[None])


@triton.jit
def _kept(now, state, offset, is_kept, held):
    """Stores the state in its slot, if it has one; then continues with the stored value, as a request that starts there does."""
    if is_kept:
        kept = now.to(state.dtype.element_ty)
        tl.store(state + offset, kept, mask=held)
        now = kept.to(tl.float32)
    return now


@triton.jit
def _joined(decay, added, later_decay, later_added):
    return decay * later_decay, added * later_decay + later_added


@triton.jit
def _decay(total, which):
    """[i, j]: what remains at token i of what token j wrote, where `which` is true; else 0."""
    return tl.exp(tl.where(which, total[:, None] - total[None], float("-inf")))


@triton.jit
def _tile(base, row, there, column, row_stride, column_stride, SIZE: tl.constexpr):
    """[rows, columns], zero outside."""
    at = base + row.to(tl.int64)[:, None] * row_stride + column[None] * column_stride
    return tl.load(at, mask=there[:, None] & (column < SIZE)[None], other=0.0)


@triton.jit
def _unit(rows, eps, NORMALISE: tl.constexpr):
    """A factor for each row that makes it of unit length if NORMALISE; else 1."""
    factor = tl.full([rows.shape[0]], 1.0, tl.float32)
    if NORMALISE:
        wide = rows.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) + eps)
    return factor


@triton.jit
def scan_numbers(
    decay, x, output, states, slots, continues, requests, chunks, decay_row, decay_dim, x_row, x_dim, output_row, slot_stride, initial,
    C: tl.constexpr, MAXIMUM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Takes some channels of a state [C] through a request, BLOCK_T tokens at a time; `requests` and `chunks` as above. A token's output is
    the state before it, so the scan is over the tokens before each."""
    request, channel = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    t, first, count = tl.arange(0, BLOCK_T), tl.load(requests + request), tl.load(requests + tl.num_programs(0) + request)
    held = channel < C
    before = states + channel + tl.load(slots + request).to(tl.int64) * slot_stride
    now = tl.load(before, mask=held & tl.load(continues + request), other=0.0).to(tl.float32)
    now = tl.where(tl.load(continues + request), now, initial)
    for chunk in range(first, first + count):
        start, tokens = tl.load(chunks + 3 * chunk).to(tl.int64), tl.load(chunks + 3 * chunk + 1)
        row, past = start + t, (t > 0) & (t < tokens)
        passed = _tile(decay, row - 1, past, channel, decay_row, decay_dim, C).to(tl.float32)
        added = _tile(x, row - 1, past, channel, x_row, x_dim, C).to(tl.float32)
        last = start + tokens - 1
        last_passed = tl.load(decay + last * decay_row + channel * decay_dim, mask=held, other=0.0).to(tl.float32)
        last_added = tl.load(x + last * x_row + channel * x_dim, mask=held, other=0.0).to(tl.float32)
        if MAXIMUM:
            passed, added = tl.associative_scan((passed, tl.where(past[:, None], added, float("-inf"))), 0, _joined_maxima)
            every = tl.maximum(now[None] + passed, added)
        else:
            passed, added = tl.associative_scan((tl.where(past[:, None], passed, 1.0), added), 0, _joined)
            every = now[None] * passed + added
        out = output + row[:, None] * output_row + channel[None]
        tl.store(out, every.to(output.dtype.element_ty), mask=(t < tokens)[:, None] & held[None])
        now = tl.sum(tl.where((t == tokens - 1)[:, None], every, 0.0), 0)
        if MAXIMUM:
            now = tl.maximum(now + last_passed, last_added)
        else:
            now = now * last_passed + last_added
        slot = tl.load(chunks + 3 * chunk + 2)
        now = _kept(now, states + channel, slot * slot_stride, slot > 0, held)


@triton.jit
def _joined_maxima(decay, added, later_decay, later_added):
    return decay + later_decay, tl.maximum(added + later_decay, later_added)
