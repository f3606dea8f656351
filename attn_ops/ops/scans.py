"""The ops of layers with recurrent state that a model computes function by function, such as `torch.ops.paged_attn.kda_with_output`.

In: rows of tokens of one layer. Out: written into `output`; the states advance in the forward context's pool. All are split ops, and may be
captured with a whole decode step, because a step reads its slots on the device. They run on their layer's states and this step's rows,
both from the thread's forward context, with the float32 reference in `attn_ops/scans/` or the layer's own backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
from paged_attn.attn_ops.scans.state_rows import RecurrentPlan

# Takes the same arguments as the reference; returns False, having written nothing, for those that it does not serve.
Kernel = Callable[..., bool]


def run_scan(
    op: str, layer_id: int, state_id: int, extend: Callable[..., None], step: Callable[..., None], given: tuple[Any, ...], output: Tensor,
    limits: tuple[float, ...] = (),
) -> None:  # fmt: skip
    """Run each call of the plan: `extend(*given, *limits, states, extends)`, then `step(*given, states, rows)`; padding becomes zero.

    Raises:
        ContextError: no forward context, one without recurrent state, or a different number of rows than the batch has.
    """
    context, recurrent = recurrent_context_of(op, layer_id, output.shape[0])
    plan: RecurrentPlan = context.recurrent_plan
    states, kernels = recurrent.state(layer_id, state_id), recurrent.kernels(layer_id)
    for rows in plan.calls:
        if rows.extends is not None:
            _compute(extend, kernels.get(extend), (*given, *limits, states, rows.extends))
        if rows.num_decode:
            _compute(step, kernels.get(step), (*given, states, rows))
    output[plan.num_tokens :].zero_()


def _compute(truth: Callable[..., None], kernel: Kernel | None, given: tuple[Any, ...]) -> None:
    if kernel is None or not kernel(*given):
        truth(*given)


# Linear attention with a state that decays and is corrected token by token, with one decay per head, or one per channel of its keys
# (Kimi delta attention).
def _gated_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, layer_id: int, state_id: int
) -> None:
    """query, key [T, key heads, K]; value, output [T, H, V]; g (logarithms of decays), beta [T, H]; the state is [H, K, V].

    `normalise`: queries and keys are normalized to unit length first. Rows past the batch's real tokens are zeroed.
    """
    given = (query, key, value, g, beta, output, normalise)
    run_scan("gated_delta_rule", layer_id, state_id, gated_delta_extend, gated_delta_step, given, output)


def _kda(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, layer_id: int, state_id: int
) -> None:
    """Like `_gated_delta`, with g [T, H, K]."""
    run_scan("kda", layer_id, state_id, kda_extend, gated_delta_step, (query, key, value, g, beta, output, normalise), output)


_SCHEMA = (
    "_with_output(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor(a!) output, bool normalise, int layer_id, "
    "int state_id) -> ()"
)
GATED_DELTA_RULE = define_op("gated_delta_rule" + _SCHEMA, _gated_delta)
KDA = define_op("kda" + _SCHEMA, _kda)


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
    context, recurrent = recurrent_context_of("gated_delta_net", layer_id, output.shape[0])
    plan: RecurrentPlan = context.recurrent_plan
    states, kernels, gates = recurrent.state(layer_id, state_id), recurrent.kernels(layer_id), list[Tensor]()
    for rows in plan.calls:
        if rows.extends is not None:
            if not gates:
                gates = [torch.empty(output.shape[:2], device=output.device) for _ in range(2)]
                _compute(net_gates, kernels.get(net_gates), (net, *gates))
            given = (query, key, value, *gates, output, normalise, states, rows.extends)
            _compute(gated_delta_extend, kernels.get(gated_delta_extend), given)
            _compute(net_norm, kernels.get(net_norm), (net, output, rows.extends))
        if rows.num_decode:
            given = (query, key, value, net, output, normalise, states, rows)
            _compute(gated_delta_net_step, kernels.get(gated_delta_net_step), given)
    output[plan.num_tokens :].zero_()


GATED_DELTA_NET = define_op(
    "gated_delta_net_with_output(Tensor query, Tensor key, Tensor value, Tensor a, int[] a_columns, Tensor b, int[] b_columns, Tensor z, "
    "int[] z_columns, Tensor a_log, Tensor dt_bias, Tensor scale, Tensor(a!) output, bool normalise, float factor, float eps, "
    "float offset, str act, int layer_id, int state_id) -> ()",
    _gated_delta_net,
)


# The same without the correction, as in lightning attention, retention and gated linear attention.
def _linear_attention(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, output: Tensor, before: bool, layer_id: int, state_id: int
) -> None:
    """query, key [T, H, K]; value, output [T, H, V]; g (logarithms of decays) [T, H] or [T, H, K]; the state is [H, K, V].

    `before`: queries read the state before their token changes it. Rows past the batch's real tokens are zeroed.
    """
    given = (query, key, value, g, output, before)
    run_scan("linear_attention", layer_id, state_id, linear_attention_extend, linear_attention_step, given, output)


LINEAR_ATTENTION = define_op(
    "linear_attention_with_output(Tensor query, Tensor key, Tensor value, Tensor g, Tensor(a!) output, bool before, "
    "int layer_id, int state_id) -> ()",
    _linear_attention,
)


# The scans of state-space layers. What surrounds a scan (softplus of dt, the direct term D x, the gate) is part of the graph.
def _mamba2(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, low: float, high: float, layer_id: int, state_id: int
) -> None:
    """x, output [T, H, P]; dt [T, H]; a [H], negative; b, c [T, groups, N]; the state is [H, P, N].

    dt is clamped to [low, high], except in decoding rows, as in the models. Rows past the batch's real tokens are zeroed.
    """
    run_scan("mamba2_scan", layer_id, state_id, mamba2_extend, mamba2_step, (x, dt, a, b, c, output), output, (low, high))


def _mamba1(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, output: Tensor, layer_id: int, state_id: int) -> None:
    """x, dt, output [T, channels]; a [channels, N], negative; b, c [T, N]; the state is [channels, N]. Rows past the batch's real tokens
    are zeroed."""
    run_scan("mamba1_scan", layer_id, state_id, mamba1_extend, mamba1_step, (x, dt, a, b, c, output), output)


MAMBA2_SCAN = define_op(
    "mamba2_scan_with_output(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor(a!) output, float low, float high, int layer_id, "
    "int state_id) -> ()",
    _mamba2,
)
MAMBA1_SCAN = define_op(
    "mamba1_scan_with_output(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor(a!) output, int layer_id, int state_id) -> ()",
    _mamba1,
)


# A scan of single numbers, which returns the state before each token.
def _channels(decay: Tensor, x: Tensor, output: Tensor, maximum: bool, initial: float, layer_id: int, state_id: int) -> None:
    """decay, x, output [T, channels]; the state is [channels], of fresh requests `initial`. Rows past the batch's real tokens are zeroed.

    `maximum`: S = max(S + decay, x), else S = decay S + x.
    """
    run_scan("channel_scan", layer_id, state_id, channel_scan_extend, channel_scan_step, (decay, x, output, maximum, initial), output)


CHANNEL_SCAN = define_op(
    "channel_scan_with_output(Tensor decay, Tensor x, Tensor(a!) output, bool maximum, float initial, int layer_id, int state_id) -> ()",
    _channels,
)


# A causal convolution over the last few tokens of each request.
def _short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, activation: str, columns: Sequence[int], layer_id: int, state_id: int
) -> None:
    """x [T, N], of which `columns` are the C channels (`channels_in`; none: all); output [T, C]; weight [C, taps]; bias [C]; activation ""
    or "silu"; the state is [C, taps - 1 or more]. Rows past the batch's real tokens are zeroed."""
    given = (x, weight, bias, output, activation, columns)
    run_scan("short_conv", layer_id, state_id, short_conv_extend, short_conv_step, given, output)


SHORT_CONV = define_op(
    "short_conv_with_output(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) output, str activation, int[] columns, int layer_id, "
    "int state_id) -> ()",
    _short_conv,
)
