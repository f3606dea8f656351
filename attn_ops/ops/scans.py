"""The ops of layers with recurrent state that a model computes function by function, such as `torch.ops.paged_attn.kda_with_output`.

In: rows of tokens of one layer. Out: written into `output`; the states advance in the forward context's pool. All are split ops, and may be
captured with a whole decode step, because a step reads its slots on the device. They run on their layer's states and this step's rows,
both from the thread's forward context, with the float32 reference in `attn_ops/scans/` or the layer's own backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from paged_attn.attn_ops.context import recurrent_context_of
from paged_attn.attn_ops.ops.define import define_op
from paged_attn.attn_ops.scans.channels import channel_scan_extend, channel_scan_step
from paged_attn.attn_ops.scans.gated_delta import gated_delta_extend, gated_delta_step
from paged_attn.attn_ops.scans.gated_delta_net import Columns, GatedDeltaNet, gated_delta_net_step, net_gates, net_norm
from paged_attn.attn_ops.scans.kda import kda_extend
from paged_attn.attn_ops.scans.linear import linear_attention_extend, linear_attention_step
from paged_attn.attn_ops.scans.mamba1 import mamba1_extend, mamba1_step
from paged_attn.attn_ops.scans.mamba2 import mamba2_extend, mamba2_step
from paged_attn.attn_ops.scans.short_conv import short_conv_extend, short_conv_step
from paged_attn.attn_ops.scans.state_rows import RecurrentPlan, StateRows

# Takes the same arguments as the reference; returns False, having written nothing, for those that it does not serve.
Kernel = Callable[..., bool]
# Functions of `attn_ops/scans/`, which define the results, and the kernels that replace them.
Kernels = Mapping[Callable[..., None], Kernel]


def run_scan(
    op: str, layer_id: int, state_id: int, extend: Callable[..., None], step: Callable[..., None], given: tuple[Any, ...], output: Tensor,
    limits: tuple[float, ...] = (),
) -> None:  # fmt: skip
    """Run each call of the plan: `extend(*given, *limits, states, extends)`, then `step(*given, states, rows)`; padding becomes zero.

    Raises:
        ContextError: no forward context, one without recurrent state, or a different number of rows than the batch has.
    """
    for rows, states, kernels in _calls(op, layer_id, state_id, output):
        if rows.extends is not None:
            _compute(kernels, extend, *given, *limits, states, rows.extends)
        if rows.num_decode:
            _compute(kernels, step, *given, states, rows)


def _calls(op: str, layer_id: int, state_id: int, output: Tensor) -> Iterator[tuple[StateRows, Tensor, Kernels]]:
    """The plan's calls, the states of the layer and its kernels; padding becomes zero behind them."""
    context, recurrent = recurrent_context_of(op, layer_id, output.shape[0])
    plan: RecurrentPlan = context.recurrent_plan
    states, kernels = recurrent.state(layer_id, state_id), recurrent.kernels(layer_id)
    for rows in plan.calls:
        yield rows, states, kernels
    output[plan.num_tokens :].zero_()


def _compute(kernels: Kernels, truth: Callable[..., None], *given: Any) -> None:
    kernel = kernels.get(truth)
    if kernel is None or not kernel(*given):
        truth(*given)


def _define(op: str, arguments: str, extend: Callable[..., None], step: Callable[..., None], limits: int = 0) -> OpOverload:
    """An op that calls `run_scan`, with layer and state behind its own arguments, of which the last `limits` are for `extend` alone."""
    place = arguments.split(", ").index("Tensor(a!) output")

    def run(*given: Any) -> None:
        *operands, layer_id, state_id = given
        end = len(operands) - limits
        run_scan(op, layer_id, state_id, extend, step, tuple(operands[:end]), operands[place], tuple(operands[end:]))

    return define_op(f"{op}_with_output({arguments}, int layer_id, int state_id) -> ()", run)


# Linear attention with a state that decays and is corrected token by token, with one decay per head, or one per channel of its keys
# (Kimi delta attention). query, key [T, key heads, K]; value, output [T, H, V]; g (logarithms of decays) [T, H] or [T, H, K]; beta [T, H];
# the state is [H, K, V]. `normalise`: queries and keys are normalized to unit length first.
_RULE = "Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor(a!) output, bool normalise"
GATED_DELTA_RULE = _define("gated_delta_rule", _RULE, gated_delta_extend, gated_delta_step)
KDA = _define("kda", _RULE, kda_extend, gated_delta_step)


# The same with what surrounds it in its layer.
def _gated_delta_net(
    query: Tensor, key: Tensor, value: Tensor, a: Tensor, a_columns: Sequence[int], b: Tensor, b_columns: Sequence[int], z: Tensor,
    z_columns: Sequence[int], a_log: Tensor, dt_bias: Tensor, scale: Tensor, output: Tensor, normalise: bool, factor: float, eps: float,
    offset: float, act: str, layer_id: int, state_id: int,
) -> None:  # fmt: skip
    """query, key [T, key heads, K]; value, output [T, H, V]; a, b and z [T, N], of which these columns (`channels_in`, one view each) are
    read; for the rest see `GatedDeltaNet`; the state is [H, K, V]. Rows past the batch's real tokens are zeroed."""
    net = GatedDeltaNet(
        Columns(a, a_columns), Columns(b, b_columns), Columns(z, z_columns), a_log, dt_bias, scale, factor, eps, offset, act
    )
    gates = list[Tensor]()
    for rows, states, kernels in _calls("gated_delta_net", layer_id, state_id, output):
        if rows.extends is not None:
            if not gates:
                gates = [torch.empty(output.shape[:2], device=output.device) for _ in range(2)]
                _compute(kernels, net_gates, net, *gates)
            _compute(kernels, gated_delta_extend, query, key, value, *gates, output, normalise, states, rows.extends)
            _compute(kernels, net_norm, net, output, rows.extends)
        if rows.num_decode:
            _compute(kernels, gated_delta_net_step, query, key, value, net, output, normalise, states, rows)


GATED_DELTA_NET = define_op(
    "gated_delta_net_with_output(Tensor query, Tensor key, Tensor value, Tensor a, int[] a_columns, Tensor b, int[] b_columns, Tensor z, "
    "int[] z_columns, Tensor a_log, Tensor dt_bias, Tensor scale, Tensor(a!) output, bool normalise, float factor, float eps, "
    "float offset, str act, int layer_id, int state_id) -> ()",
    _gated_delta_net,
)


# The same without the correction, as in lightning attention, retention and gated linear attention. query, key [T, H, K]; value, output
# [T, H, V]; g (logarithms of decays) [T, H] or [T, H, K]; the state is [H, K, V]. `before`: queries read the state before their token
# changes it.
LINEAR_ATTENTION = _define(
    "linear_attention", "Tensor query, Tensor key, Tensor value, Tensor g, Tensor(a!) output, bool before",
    linear_attention_extend, linear_attention_step,
)  # fmt: skip

# The scans of state-space layers. What surrounds a scan (softplus of dt, the direct term D x, the gate) is part of the graph.
# x, output [T, H, P]; dt [T, H]; a [H], negative; b, c [T, groups, N]; the state is [H, P, N]. dt is clamped to [low, high], except in
# decoding rows, as in the models.
MAMBA2_SCAN = _define(
    "mamba2_scan", "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor(a!) output, float low, float high",
    mamba2_extend, mamba2_step, limits=2,
)  # fmt: skip
# x, dt, output [T, channels]; a [channels, N], negative; b, c [T, N]; the state is [channels, N].
MAMBA1_SCAN = _define("mamba1_scan", "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor(a!) output", mamba1_extend, mamba1_step)

# A scan of single numbers, which returns the state before each token. decay, x, output [T, channels]; the state is [channels], of fresh
# requests `initial`. `maximum`: S = max(S + decay, x), else S = decay S + x.
CHANNEL_SCAN = _define(
    "channel_scan", "Tensor decay, Tensor x, Tensor(a!) output, bool maximum, float initial", channel_scan_extend, channel_scan_step
)

# A causal convolution over the last few tokens of each request. x [T, N], of which `columns` are the C channels (`channels_in`; none: all);
# output [T, C]; weight [C, taps]; bias [C]; activation "" or "silu"; the state is [C, taps - 1 or more].
SHORT_CONV = _define(
    "short_conv", "Tensor x, Tensor weight, Tensor? bias, Tensor(a!) output, str activation, int[] columns",
    short_conv_extend, short_conv_step,
)  # fmt: skip
