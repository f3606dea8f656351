"""`torch.ops.paged_attn.mamba2_scan_with_output` and `mamba1_scan_with_output`: the scans of state-space layers.

What stands around a scan (softplus of dt, the direct term D x, the gate) is a part of the graph.
"""

from __future__ import annotations

from torch import Tensor

from paged_attn.attn_ops.ops.define import define_op
from paged_attn.attn_ops.ops.scans.kernels import run_scan
from paged_attn.attn_ops.scans.mamba1 import mamba1_extend, mamba1_step
from paged_attn.attn_ops.scans.mamba2 import mamba2_extend, mamba2_step


def _run2(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, low: float, high: float, layer_id: int, state_id: int
) -> None:
    """x, output [T, H, P]; dt [T, H]; a [H], negative; b, c [T, groups, N]; the state is [H, P, N].

    dt is kept between `low` and `high`, but for decoding rows, as models have it. Rows past the batch's real tokens are zeroed.
    """
    run_scan("mamba2_scan", layer_id, state_id, mamba2_extend, mamba2_step, (x, dt, a, b, c, output), output, (low, high))


def _run1(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, layer_id: int, state_id: int) -> None:
    """x, dt, output [T, channels]; a [channels, N], negative; b, c [T, N]; the state is [channels, N]. Rows past the batch's real tokens
    are zeroed."""
    run_scan("mamba1_scan", layer_id, state_id, mamba1_extend, mamba1_step, (x, dt, a, b, c, output), output)


MAMBA2_SCAN = define_op(
    "mamba2_scan_with_output(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor(a!) output, float low, float high, int layer_id, "
    "int state_id) -> ()",
    _run2,
)
MAMBA1_SCAN = define_op(
    "mamba1_scan_with_output(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor(a!) output, int layer_id, int state_id) -> ()",
    _run1,
)
