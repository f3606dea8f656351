"""`torch.ops.paged_attn.short_conv_with_output`: a causal convolution over the last few tokens of each request."""

from __future__ import annotations

from torch import Tensor

from paged_attn.attn_ops.ops.define import define_op
from paged_attn.attn_ops.ops.scans.kernels import run_scan
from paged_attn.attn_ops.ops.scans.states import states_and_plan
from paged_attn.attn_ops.scans.short_conv import short_conv_extend, short_conv_step


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, activation: str, layer_id: int, state_id: int) -> None:
    """x, output [T, C]; weight [C, taps]; bias [C]; activation "" or "silu"; the state is [C, taps - 1 or more]. Rows past the batch's
    real tokens are zeroed."""
    found = states_and_plan("short_conv", x.shape[0], layer_id, state_id)
    run_scan(short_conv_extend, short_conv_step, (x, weight, bias, output, activation), (), output, *found)


SHORT_CONV = define_op(
    "short_conv_with_output(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) output, str activation, int layer_id, int state_id) -> ()",
    _run,
)
