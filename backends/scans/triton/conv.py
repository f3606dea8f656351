"""Launches the kernels of the short convolution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import triton
from torch import Tensor

from paged_attn.attn_ops.scans.short_conv import channels_in
from paged_attn.attn_ops.scans.state_rows import Extends, StateRows
from paged_attn.backends.compiling.compile_ahead import launch
from paged_attn.backends.fast_launch import keyed_launch
from paged_attn.backends.machine import blocks_of, early_start, power_of_2
from paged_attn.backends.scans.triton.conv_kernel import conv_extend, conv_state, conv_step
from paged_attn.backends.unit_stride import unit_last

BLOCK = 128  # channels of a program
PROMPT_TOKENS, PROMPT_BLOCK = 8, 256  # for prompts; the fastest of twelve on an H100, at 1.6 times the time to read and write x


class _Part(NamedTuple):
    """Evenly spaced channels of x: x [T, groups, width], and the convolution's parameters and states for them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    output: Tensor
    states: Tensor


def step(
    x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, activation: str, columns: Sequence[int], states: Tensor, rows: StateRows
) -> bool:
    """Computes `short_conv_step`; always True."""
    (channels, taps), width = weight.shape, states.shape[2]
    parts = _with_first_channels(columns)
    launch(
        conv_step, (rows.num_decode, triton.cdiv(channels, BLOCK)),
        x, weight, unit_last(bias), output, states, rows.decode_rows, rows.decode_slots, *x.stride(), *weight.stride(), output.stride(0),
        states.stride(0), C=channels, PARTS=len(parts) // 5, COLUMNS=parts, TAPS=taps, WIDTH=width, HAS_BIAS=bias is not None,
        SILU=bool(activation), HAS_ROWS=rows.decode_rows is not None, BLOCK=BLOCK, W=triton.next_power_of_2(width),
        **early_start(x.device),
    )  # fmt: skip
    return True


def _with_first_channels(columns: Sequence[int]) -> tuple[int, ...]:
    """Each part's four numbers (`channels_in`) behind its first channel."""
    numbers, channel = list[int](), 0
    for part in range(0, len(columns), 4):
        numbers += [channel, *columns[part : part + 4]]
        channel += columns[part + 1] * columns[part + 3]
    return tuple(numbers)


def extend(
    x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, activation: str, columns: Sequence[int], states: Tensor,
    extends: Extends,
) -> bool:  # fmt: skip
    """Computes `short_conv_extend`; always True."""
    taps, width = weight.shape[1], states.shape[2]
    rows, owners = extends.rows, extends.owners
    before = (extends.slots_on_device, extends.continues, extends.starts_on_device)
    for part in _parts(x, columns, weight, bias, output, states):
        channels, group = len(part.weight), part.x.shape[2]
        keyed_launch(
            conv_extend, (blocks_of(len(rows), PROMPT_TOKENS), blocks_of(channels, PROMPT_BLOCK)),
            part.x, part.weight, part.x if part.bias is None else part.bias, part.output, part.states, *before, rows, owners, len(rows),
            *part.x.stride(), *weight.stride(), output.stride(0), states.stride(0),
            C=channels, GROUP=group, TAPS=taps, WIDTH=width, HAS_BIAS=bias is not None, SILU=bool(activation), TOKENS=PROMPT_TOKENS,
            BLOCK=PROMPT_BLOCK,
        )  # fmt: skip
        keyed_launch(
            conv_state, (len(extends.lengths), blocks_of(channels, BLOCK)),
            part.x, part.states, *before, extends.ends, extends.segments_on_device, extends.targets, *part.x.stride(), states.stride(0),
            C=channels, GROUP=group, WIDTH=width, BLOCK=BLOCK, W=power_of_2(width),
        )  # fmt: skip
    return True


def _parts(x: Tensor, columns: Sequence[int], weight: Tensor, bias: Tensor | None, output: Tensor, states: Tensor) -> Iterator[_Part]:
    bias = unit_last(bias)
    if not columns:
        yield _Part(x[:, None], weight, bias, output, states)
        return
    first = 0
    for channels in channels_in(x, columns):
        own = slice(first, first + channels.shape[1] * channels.shape[2])
        yield _Part(channels, weight[own], None if bias is None else bias[own], output[:, own], states[:, own])
        first = own.stop
