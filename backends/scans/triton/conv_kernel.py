"""The short convolution for decoding rows and for prompts, and the states that prompts leave behind."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.scans.triton.steps_kernel import row_and_slot, wait


@triton.jit
def conv_step(
    x, weight, bias, output, states, rows, slots, x_row, x_channel, weight_channel, weight_tap, output_row, slot_stride,
    C: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """C columns of a row of x and the state [C, WIDTH] in its slot -> output [T, C], and the state with the row appended."""
    row, slot = row_and_slot(rows, slots, HAS_ROWS)
    channel, column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, W)[None]
    real, kept = channel < C, (channel < C) & (slot != 0)
    state, tap = states + slot * slot_stride + channel[:, None] * WIDTH, column - (WIDTH - TAPS)
    shifted = tl.load(state + column + 1, mask=kept[:, None] & (column < WIDTH - 1), other=0.0)
    factor = tl.load(
        weight + channel[:, None] * weight_channel + tap * weight_tap, mask=real[:, None] & (tap >= 0) & (tap < TAPS), other=0.0
    )
    if TAPS > WIDTH:  # the state holds only earlier tokens, so its first column is also read
        first = tl.load(states + slot * slot_stride + channel * WIDTH, mask=kept, other=0.0).to(tl.float32)
        first *= tl.load(weight + channel * weight_channel, mask=real, other=0.0).to(tl.float32)
    wait(EARLY)
    out = output + row * output_row + channel
    if slot == 0:
        tl.store(out, tl.zeros([BLOCK], output.dtype.element_ty), mask=real)
    else:
        new = tl.load(x + row * x_row + _column_of_parts(channel, PARTS, COLUMNS) * x_channel, mask=real, other=0.0)
        shifted = tl.where(column == WIDTH - 1, new[:, None].to(shifted.dtype), shifted)
        total = tl.sum(shifted.to(tl.float32) * factor.to(tl.float32), 1)
        if TAPS > WIDTH:
            total += first
        tl.debug_barrier()  # the whole old state has been read
        tl.store(state + column, shifted, mask=real[:, None] & (column < WIDTH))
        tl.store(out, _activated(total, bias, channel, real, x.dtype.element_ty, HAS_BIAS, SILU).to(output.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["tokens"])
def conv_extend(
    x, weight, bias, output, states, slots, continues, starts, rows, owners, tokens, x_row, x_group, x_channel, weight_channel, weight_tap,
    output_row, slot_stride, C: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """New tokens of x [T, C / GROUP, GROUP], which are its `rows` [N] and belong to the requests `owners` [N], whose own begin at the rows
    `starts` [E]."""
    i, channel = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, real, column = i < tokens, channel < C, _column(channel, x_group, x_channel, C, GROUP)
    row, owner = tl.load(rows + i, mask=there, other=0), tl.load(owners + i, mask=there, other=0)
    earlier = row - tl.load(starts + owner, mask=there, other=-TAPS)  # new tokens of the same request before each
    if tl.min(earlier, 0) < TAPS - 1:  # few tiles read tokens from states
        total = _convolved(x, weight, states, slots, continues, row, owner, earlier, channel, column, there, real, x_row, weight_channel,
                           weight_tap, slot_stride, TAPS, WIDTH, True, TOKENS, BLOCK)  # fmt: skip
    else:
        total = _convolved(x, weight, states, slots, continues, row, owner, earlier, channel, column, there, real, x_row, weight_channel,
                           weight_tap, slot_stride, TAPS, WIDTH, False, TOKENS, BLOCK)  # fmt: skip
    result = _activated(total, bias, channel[None], real[None], x.dtype.element_ty, HAS_BIAS, SILU)
    tl.store(output + row[:, None] * output_row + channel[None], result.to(output.dtype.element_ty), mask=there[:, None] & real[None])


@triton.jit
def _convolved(
    x, weight, states, slots, continues, row, owner, earlier, channel, column, there, real, x_row, weight_channel, weight_tap, slot_stride,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, OLD: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 [TOKENS, BLOCK]. Without OLD all read tokens are new, and no load waits for another tap's."""
    total, held = tl.zeros([TOKENS, BLOCK], tl.float32), there[:, None] & real[None]
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        value = _new(x, (row - back)[:, None], column[None], held & (earlier >= back)[:, None], x_row, states.dtype.element_ty)
        if OLD:
            place, old = WIDTH + earlier - back, there & (earlier < back)
            kept = _kept(states, slots, continues, owner[:, None], place[:, None], channel[None], held & old[:, None], slot_stride, WIDTH)
            value = tl.where(old[:, None], kept, value)
        factor = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=real, other=0.0)
        total += value.to(tl.float32) * factor.to(tl.float32)[None]
    return total


@triton.jit
def conv_state(
    x, states, slots, continues, starts, ends, segments, targets, x_row, x_group, x_channel, slot_stride, C: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The states [C, WIDTH] after the segments of a request, whose tokens begin at a row of x in `starts` [E]. `ends` [S]: the row past
    each segment; `targets` [S]: the states' slots; `segments` [2, E]: the request's first segment, and their number. The last one writes
    the request's own slot, which those before it read."""
    i, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column, real, new = tl.arange(0, W)[None], (channel < C)[:, None], _column(channel, x_group, x_channel, C, GROUP)[:, None]
    first, count, start = tl.load(segments + i), tl.load(segments + tl.num_programs(0) + i), tl.load(starts + i)
    held = real & (column < WIDTH)
    for segment in range(first, first + count):
        row = tl.load(ends + segment) - WIDTH + column
        old, place = row < start, WIDTH + row - start
        kept = _kept(states, slots, continues, i, place, channel[:, None], held & old, slot_stride, WIDTH)
        value = tl.where(old, kept, _new(x, row, new, held & (row >= start), x_row, states.dtype.element_ty))
        tl.debug_barrier()  # the whole old state has been read
        state = states + tl.load(targets + segment) * slot_stride + channel[:, None] * WIDTH + column
        tl.store(state, value, mask=held)


@triton.jit
def _column_of_parts(channel, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """The column of a channel in x. COLUMNS has five numbers for each part: its first channel, then as in `channels_in`."""
    column = channel
    for part in tl.static_range(PARTS):
        own = channel - COLUMNS[5 * part]
        inside = COLUMNS[5 * part + 1] + own // COLUMNS[5 * part + 4] * COLUMNS[5 * part + 3] + own % COLUMNS[5 * part + 4]
        column = tl.where(own >= 0, inside, column)
    return column


@triton.jit
def _column(channel, x_group, x_channel, C: tl.constexpr, GROUP: tl.constexpr):
    """The offset of a channel in a row of x."""
    if GROUP == C:
        return channel * x_channel
    return channel // GROUP * x_group + channel % GROUP * x_channel


@triton.jit
def _kept(states, slots, continues, request, place, channel, held, slot_stride, WIDTH: tl.constexpr):
    """Tokens held in the states of requests, by their place; 0 where a state has none."""
    slot, known = tl.load(slots + request), tl.load(continues + request)
    return tl.load(states + slot * slot_stride + channel * WIDTH + place, mask=held & known, other=0.0)


@triton.jit
def _new(x, row, column, held, x_row, dtype: tl.constexpr):
    """New tokens in the states' dtype, as they will be stored."""
    return tl.load(x + row * x_row + column, mask=held, other=0.0).to(dtype)


@triton.jit
def _activated(total, bias, channel, real, dtype: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    if SILU:
        total = total / (1 + tl.exp(-total))
    return total
