"""Launches the kernels of the short convolution."""

from __future__ import annotations

import triton
from torch import Tensor

from paged_attn.attn_ops.scans.state_rows import Extends, StateRows
from paged_attn.backends.scans.triton.conv_kernel import conv_extend, conv_state, conv_step

BLOCK = 128  # channels of a program
PROMPT_TOKENS, PROMPT_BLOCK = 8, 256  # of prompts; on an H100 the fastest of twelve, 1.6 times what reading and writing x takes


def step(x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, activation: str, states: Tensor, rows: StateRows) -> bool:
    """As `short_conv_step`; always served."""
    (channels, taps), width = weight.shape, states.shape[2]
    conv_step[(rows.num_decode, triton.cdiv(channels, BLOCK))](
        x, weight, bias, output, states, rows.decode_rows, rows.decode_slots, *x.stride(), *weight.stride(), output.stride(0),
        states.stride(0), C=channels, TAPS=taps, WIDTH=width, HAS_BIAS=bias is not None, SILU=bool(activation),
        HAS_ROWS=rows.decode_rows is not None, BLOCK=BLOCK, W=triton.next_power_of_2(width),
    )  # fmt: skip
    return True


def extend(x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, activation: str, states: Tensor, extends: Extends) -> bool:
    """As `short_conv_extend`; always served."""
    (channels, taps), width = weight.shape, states.shape[2]
    where, last = extends.taps(taps, width)
    known, remembered = (extends.rows, extends.slots_on_device, extends.continues), len(extends.lengths) * width
    conv_extend[(triton.cdiv(len(where), PROMPT_TOKENS), triton.cdiv(channels, PROMPT_BLOCK))](
        x, weight, bias, output, states, *known, where, len(where), *x.stride(), *weight.stride(), output.stride(0), states.stride(0),
        remembered, C=channels, TAPS=taps, WIDTH=width, HAS_BIAS=bias is not None, SILU=bool(activation), TOKENS=PROMPT_TOKENS,
        BLOCK=PROMPT_BLOCK,
    )  # fmt: skip
    conv_state[(len(extends.lengths), triton.cdiv(channels, BLOCK))](
        x, states, *known, last, extends.segments_on_device, extends.targets, *x.stride(), states.stride(0), remembered, C=channels,
        WIDTH=width, BLOCK=BLOCK, W=triton.next_power_of_2(width),
    )  # fmt: skip
    return True
