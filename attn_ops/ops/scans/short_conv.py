"""`torch.ops.paged_attn.short_conv_with_output`: a causal convolution over the last few tokens of each request."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paged_attn.attn_ops.ops.define import define_op
from paged_attn.attn_ops.ops.scans.kernels import run_scan
from paged_attn.attn_ops.scans.short_conv import short_conv_extend, short_conv_step


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, activation: str, columns: Sequence[int], layer_id: int, state_id: int
) -> None:
    """x [T, N], of which `columns` are the C channels (`channels_in`; none: all); output [T, C]; weight [C, taps]; bias [C]; activation ""
    or "silu"; the state is [C, taps - 1 or more]. Rows past the batch's real tokens are zeroed."""
    given = (x, weight, bias, output, activation, columns)
    run_scan("short_conv", layer_id, state_id, short_conv_extend, short_conv_step, given, output)


SHORT_CONV = define_op(
    "short_conv_with_output(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) output, str activation, int[] columns, int layer_id, "
    "int state_id) -> ()",
    _run,
)
