"""A causal convolution of each channel over its last few tokens; the state is the preceding tokens, the latest last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.scans.state_rows import Extends, StateRows

ACTIVATIONS = ("", "silu")


def channels_in(x: Tensor, columns: Sequence[int]) -> list[Tensor]:
    """Views [T, groups, width] of x [T, N] that together hold all channels of a convolution, in order.

    `columns` has four numbers for each view: its first column, its number of groups, the distance in columns between groups, and their
    width.
    """
    (row, column), first = x.stride(), x.storage_offset()
    parts = [columns[i : i + 4] for i in range(0, len(columns), 4)]
    return [
        x.as_strided((x.shape[0], groups, width), (row, apart * column, column), first + start * column)
        for start, groups, apart, width in parts
    ]


def short_conv_extend(
    x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, activation: str, columns: Sequence[int], states: Tensor,
    extends: Extends,
) -> None:  # fmt: skip
    """x [T, N], of which `columns` are the C channels (`channels_in`; none: all); output [T, C]; weight [C, taps]; bias [C]; states
    [slots, C, width], width >= taps - 1."""
    x = _joined(x, columns)
    count, width = weight.shape[1], states.shape[2]
    rows, before = extends.rows, extends.before(states)
    seen = torch.cat([before.transpose(1, 2).reshape(-1, x.shape[1]), x[rows].to(before.dtype)])
    taps, last = extends.taps(count, width)
    result = _summed([seen[taps[:, tap]] for tap in range(count)], weight, bias)
    output[rows] = _activated(result.to(x.dtype), activation).to(output.dtype)
    states[extends.targets] = seen[last].transpose(1, 2)


def short_conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, activation: str, columns: Sequence[int], states: Tensor,
    rows: StateRows,
) -> None:  # fmt: skip
    """Like `short_conv_extend`, for the decoding rows."""
    x = _joined(x, columns)
    count, slots = weight.shape[1], rows.decode_slots
    seen = torch.cat([states[slots], rows.decoding(x)[..., None].to(states.dtype)], -1)
    result = _summed(list(seen[..., seen.shape[2] - count :].unbind(-1)), weight, bias)
    rows.put_decoded(output, _activated(result.to(x.dtype), activation))
    states[slots] = seen[..., 1:]


def _joined(x: Tensor, columns: Sequence[int]) -> Tensor:
    return x if not columns else torch.cat([part.flatten(1) for part in channels_in(x, columns)], 1)


def _summed(taps: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    result = taps[0].float() * weight[:, 0].float()
    for tap, values in enumerate(taps[1:], 1):
        result += values.float() * weight[:, tap].float()
    return result if bias is None else result + bias.float()


def _activated(result: Tensor, activation: str) -> Tensor:
    return F.silu(result) if activation else result
