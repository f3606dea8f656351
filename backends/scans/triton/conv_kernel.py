"""The short convolution for decoding rows and for prompts, and the states that prompts leave behind."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def conv_step(
    x, weight, bias, output, states, rows, slots, x_row, x_channel, weight_channel, weight_tap, output_row, slot_stride,
    C: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """C columns of a row of x and the state [C, WIDTH] in its slot -> output [T, C], and the state with the row appended."""
    i, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, slot, real = i, tl.load(slots + i).to(tl.int64), channel < C
    if HAS_ROWS:
        row = tl.load(rows + i)
    out = output + row.to(tl.int64) * output_row + channel
    if slot == 0:
        tl.store(out, tl.zeros([BLOCK], output.dtype.element_ty), mask=real)
    else:
        new = tl.load(x + row.to(tl.int64) * x_row + _column_of_parts(channel, PARTS, COLUMNS) * x_channel, mask=real, other=0.0)
        state, column = states + slot * slot_stride + channel[:, None] * WIDTH, tl.arange(0, W)[None]
        shifted = tl.load(state + column + 1, mask=real[:, None] & (column < WIDTH - 1), other=0.0)
        shifted = tl.where(column == WIDTH - 1, new[:, None].to(shifted.dtype), shifted)
        tap = column - (WIDTH - TAPS)
        read = real[:, None] & (tap >= 0) & (tap < TAPS)
        factor = tl.load(weight + channel[:, None] * weight_channel + tap * weight_tap, mask=read, other=0.0)
        total = tl.sum(shifted.to(tl.float32) * factor.to(tl.float32), 1)
        if TAPS > WIDTH:  # the state holds only earlier tokens, so its first column is also read
            first = tl.load(states + slot * slot_stride + channel * WIDTH, mask=real, other=0.0)
            total += first.to(tl.float32) * tl.load(weight + channel * weight_channel, mask=real, other=0.0).to(tl.float32)
        tl.debug_barrier()  # the whole old state has been read
        tl.store(state + column, shifted, mask=real[:, None] & (column < WIDTH))
        tl.store(out, _activated(total, bias, channel, real, x.dtype.element_ty, HAS_BIAS, SILU).to(output.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["tokens", "remembered"])
def conv_extend(
    x, weight, bias, output, states, rows, slots, continues, taps, tokens, x_row, x_group, x_channel, weight_channel, weight_tap,
    output_row, slot_stride, remembered, C: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """New tokens of x [T, C / GROUP, GROUP]. `taps` [N, TAPS]: indices of the tokens that each of them reads, first those in states
    (`remembered` rows), then those in x."""
    i, channel = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, real, column = i < tokens, channel < C, _column(channel, x_group, x_channel, C, GROUP)
    taps += i * TAPS
    if tl.min(tl.load(taps, mask=there, other=remembered), 0) < remembered:  # few tiles read tokens from states
        total = _convolved(x, weight, states, rows, slots, continues, taps, channel, column, there, real, x_row, weight_channel,
                           weight_tap, slot_stride, remembered, TAPS, WIDTH, True, TOKENS, BLOCK)  # fmt: skip
    else:
        total = _convolved(x, weight, states, rows, slots, continues, taps, channel, column, there, real, x_row, weight_channel,
                           weight_tap, slot_stride, remembered, TAPS, WIDTH, False, TOKENS, BLOCK)  # fmt: skip
    result = _activated(total, bias, channel[None], real[None], x.dtype.element_ty, HAS_BIAS, SILU)
    row = tl.load(rows + i, mask=there, other=0)
    tl.store(output + row[:, None] * output_row + channel[None], result.to(output.dtype.element_ty), mask=there[:, None] & real[None])


@triton.jit
def _convolved(
    x, weight, states, rows, slots, continues, taps, channel, column, there, real, x_row, weight_channel, weight_tap, slot_stride,
    remembered, TAPS: tl.constexpr, WIDTH: tl.constexpr, OLD: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 [TOKENS, BLOCK]. Without OLD all read tokens are new, and no load waits for another tap's."""
    total, held = tl.zeros([TOKENS, BLOCK], tl.float32), there[:, None] & real[None]
    for tap in tl.static_range(TAPS):
        at = tl.load(taps + tap, mask=there, other=remembered)
        value = _new(x, states, rows, at[:, None], column[None], held, x_row, remembered)
        if OLD:
            kept = _kept(states, slots, continues, at[:, None], channel[None], held, slot_stride, remembered, WIDTH)
            value = tl.where((at < remembered)[:, None], kept, value)
        factor = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=real, other=0.0)
        total += value.to(tl.float32) * factor.to(tl.float32)[None]
    return total


@triton.jit(do_not_specialize=["remembered"])
def conv_state(
    x, states, rows, slots, continues, last, segments, targets, x_row, x_group, x_channel, slot_stride, remembered, C: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The states [C, WIDTH] after the segments of a request. `last` [S, WIDTH]: indices of the last tokens, like `taps`; `targets` [S]: the
    states' slots; `segments` [2, E]: the request's first segment, and their number. The last one writes the request's own slot, which
    those before it read."""
    i, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column, real, new = tl.arange(0, W)[None], (channel < C)[:, None], _column(channel, x_group, x_channel, C, GROUP)[:, None]
    first, count = tl.load(segments + i), tl.load(segments + tl.num_programs(0) + i)
    for segment in range(first, first + count):
        at = tl.load(last + segment * WIDTH + column, mask=column < WIDTH, other=0)
        held = real & (column < WIDTH)
        kept = _kept(states, slots, continues, at, channel[:, None], held, slot_stride, remembered, WIDTH)
        value = tl.where(at < remembered, kept, _new(x, states, rows, at, new, held, x_row, remembered))
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
def _kept(states, slots, continues, at, channel, held, slot_stride, remembered, WIDTH: tl.constexpr):
    """Tokens held in states; 0 where a state has none, and for new tokens."""
    old = at < remembered
    request = tl.where(old, at // WIDTH, 0)
    known = old & tl.load(continues + request)
    return tl.load(states + tl.load(slots + request) * slot_stride + channel * WIDTH + at % WIDTH, mask=held & known, other=0.0)


@triton.jit
def _new(x, states, rows, at, column, held, x_row, remembered):
    """New tokens in the states' dtype, as they will be stored; 0 for those in states."""
    row = tl.load(rows + tl.where(at < remembered, 0, at - remembered))
    return tl.load(x + row * x_row + column, mask=held & (at >= remembered), other=0.0).to(states.dtype.element_ty)


@triton.jit
def _activated(total, bias, channel, real, dtype: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    if SILU:
        total = total / (1 + tl.exp(-total))
    return total
