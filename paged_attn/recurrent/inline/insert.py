"""Puts an op on slots into the graph of a layer's step, in the place of what updates and reads a state."""

from __future__ import annotations

import math

import torch
from torch import fx

from paged_attn.attn_ops.ops.scans import CHANNEL_SCAN, GATED_DELTA_RULE, KDA, LINEAR_ATTENTION, MAMBA1_SCAN, SHORT_CONV
from paged_attn.attn_ops.scans.gated_delta import CHUNK
from paged_attn.attn_ops.scans.kda import PART
from paged_attn.recurrent.inline.find.channels import ChannelScan
from paged_attn.recurrent.inline.find.dims import sizes
from paged_attn.recurrent.inline.find.factors import Factor, constant, reduced, without_constants
from paged_attn.recurrent.inline.find.forms import Read, Recurrence
from paged_attn.recurrent.inline.find.selective import Selective, selective_of
from paged_attn.recurrent.inline.find.windows import Window
from paged_attn.recurrent.inline.operands import Operands
from paged_attn.recurrent.inline.step_graph import StepGraph
from paged_attn.recurrent.program import NoOpFits, Part, StateLayout

aten = torch.ops.aten
Found = Recurrence | Window | ChannelScan
TAPS = -2  # the axis of a convolution's taps, which has one more than the state, or fewer
WIDEST = 64  # times a token's own width; Mamba's discretized matrices are half of it
SHORTEST = 1e-20  # a time step that decays nothing, and by which numbers can still be divided


def refuse_wide(step: StepGraph, found: Recurrence) -> None:
    """Raises NoOpFits if a token's scores and decays, or its state where that is read as it is, take too much memory."""
    if found.summed and selective_of(found) is not None:
        return
    heads, keys = (math.prod(found.axes[axis] for axis in axes) for axes in (found.heads, found.keys))
    own = heads * max(CHUNK, CHUNK // PART * keys) if found.summed else heads
    allowed = WIDEST * max(math.prod(sizes(node)[1:]) for node in step.inputs)
    if own > allowed:
        raise NoOpFits(f"for each token it would need {own:,} scores, decays or elements of its state; allowed are {allowed:,}")


def layout_of(found: Found, part: Part) -> StateLayout:
    ones = [axis for axis in range(len(found.shape)) if axis not in found.axes]
    if isinstance(found, ChannelScan):
        return StateLayout(part, found.shape, ((*ones, *found.channels),))
    if isinstance(found, Window):
        return StateLayout(part, found.shape, ((*ones, *found.channels), () if found.taps is None else (found.taps,)))
    dims = (*ones, *found.heads), tuple(found.keys), tuple(found.values)
    return StateLayout(part, found.shape, dims if found.summed and selective_of(found) is None else dims[:2])


def insert_op(step: StepGraph, found: Found, layer_id: fx.Node, state_id: int, initial: float) -> str:
    """From now on what is read of the state is the output of an op, whose name this returns.

    Args:
        initial: what the state of a new request holds.

    Raises:
        NoOpFits: the op's state starts from zeros, and this one does not.
    """
    if initial != 0 and not isinstance(found, ChannelScan):
        raise NoOpFits(f"its state starts from {initial:g}, and only one of single numbers may start from another number than 0")
    ids = layer_id, state_id
    anchor, earlier = _after_operands(step, found)
    with step.graph.inserting_before(anchor):
        if isinstance(found, ChannelScan):
            build = Operands(step, found.axes, found.channels)
            name, output = "channel_scan", _channel_scan(build, found, initial, *ids)
        elif isinstance(found, Window):
            build = Operands(step, {**found.axes, TAPS: found.count}, found.channels)
            name, output = "short_conv", _short_conv(build, found, *ids)
        else:
            build = Operands(step, found.axes, found.heads, found.values)
            name, output = _of_matrix(build, found, *ids) if found.summed else _scan_of_channels(build, found, *ids)
        results = [build.as_read(_with_more(build, found, output, read), read.dims, read.node) for read in found.reads]
    last = results[-1]
    for node in earlier:
        last.append(node)
        last = node
    for read, result in zip(found.reads, results, strict=True):
        result.meta = read.node.meta
        read.node.replace_all_uses_with(result)
        step.replaced[read.node] = result
    return name


def _channel_scan(build: Operands, found: ChannelScan, initial: float, layer_id: fx.Node, state_id: int) -> fx.Node:
    decay, x = (build.summed(products) for products in (found.decay, found.x))
    output = build.made(aten.new_empty.default, (build.step.rows, build.count(found.channels)))
    build.call(CHANNEL_SCAN, decay, x, output, found.maximum, initial, layer_id, state_id)
    return output


def _short_conv(build: Operands, found: Window, layer_id: fx.Node, state_id: int) -> fx.Node:
    x = build.call(aten.squeeze.dim, build.product([found.new], []), 2)
    channels, dtype = build.count(found.channels), dtype_of(found.new)
    if isinstance(found.weights, int):
        after = found.count - 1 - found.weights
        parts = (found.weights, aten.new_zeros.default), (1, aten.new_ones.default), (after, aten.new_zeros.default)
        weight = build.call(aten.cat.default, [build.made(target, (channels, size), dtype=dtype) for size, target in parts], 1)
    else:
        dims = tuple(tuple(TAPS if axis == found.taps else axis for axis in dim) for dim in found.weights.dims)
        weight = build.per_channel([Factor(found.weights.node, dims)], [TAPS])
    output = build.made(aten.new_empty.default, (build.step.rows, channels), dtype=dtype)
    build.call(SHORT_CONV, x, weight, None, output, "", [], layer_id, state_id)
    return output


def _with_more(build: Operands, found: Found, output: fx.Node, read: Read) -> fx.Node:
    """The op's output and what a token adds to it by itself, such as its value by its key and a bonus."""
    for product in read.more:
        assert isinstance(found, Recurrence)
        keys = build.product([factor for factor in product if factor.axes & found.summed], found.keys)
        values = build.product([factor for factor in product if not factor.axes & found.summed], found.values)
        more = build.call(aten.mul.Tensor, build.call(aten.sum.dim_IntList, keys, [-1], True), values)
        output = build.call(aten.add.Tensor, output, more)
    return output


def dtype_of(factor: Factor) -> torch.dtype:
    assert isinstance(factor.node, fx.Node)
    dtype: torch.dtype = factor.node.meta["val"].dtype
    return dtype


def _of_matrix(build: Operands, found: Recurrence, layer_id: fx.Node, state_id: int) -> tuple[str, fx.Node]:
    selective = selective_of(found)
    if selective is not None:
        return _selective_scan(build, found, selective, layer_id, state_id)
    return (_linear_attention if found.share is None else _delta_rule)(build, found, layer_id, state_id)


def _selective_scan(build: Operands, found: Recurrence, parts: Selective, layer_id: fx.Node, state_id: int) -> tuple[str, fx.Node]:
    dt, x = (build.call(aten.squeeze.dim, build.float32(build.product(each, [])), 2) for each in (parts.steps, parts.x))
    if not parts.divided:
        dt = build.call(aten.masked_fill.Scalar, dt, build.call(aten.lt.Scalar, build.call(aten.abs.default, dt), SHORTEST), SHORTEST)
        x = build.call(aten.div.Tensor, x, dt)
    of_all = Operands(build.step, found.axes, [])
    queries = [factor for factor in found.query if factor.axes & found.summed]
    b, c = (build.call(aten.squeeze.dim, of_all.product(each, found.keys), 1) for each in (found.of_keys, queries))
    output = build.made(aten.new_empty.default, (build.step.rows, build.count(found.heads)))
    build.call(MAMBA1_SCAN, x, dt, build.float32(build.per_channel(parts.rates, found.keys)), b, c, output, layer_id, state_id)
    if parts.more:
        output = build.call(aten.mul.Tensor, output, build.call(aten.squeeze.dim, build.product(parts.more, []), 2))
    return "mamba1_scan", output


def _linear_attention(build: Operands, found: Recurrence, layer_id: fx.Node, state_id: int) -> tuple[str, fx.Node]:
    query, key = (build.product(factors, found.keys) for factors in (found.query, found.of_keys))
    value, decays, output = build.product(found.of_values, found.values), build.decays(found), _new_output(build, found)
    build.call(LINEAR_ATTENTION, query, key, value, decays, output, found.before, layer_id, state_id)
    return "linear_attention", output


def _delta_rule(build: Operands, found: Recurrence, layer_id: fx.Node, state_id: int) -> tuple[str, fx.Node]:
    assert found.share is not None
    scale = constant(found.query) * build.count(found.keys) ** 0.5  # the op divides by the root
    query = build.product(reduced([*without_constants(found.query), Factor(scale)]), found.keys)
    key, value, decays = build.product(found.of_keys, found.keys), build.product(found.of_values, found.values), build.decays(found)
    share = build.call(aten.squeeze.dim, build.product(found.share, []), 2)
    name, op = ("kda", KDA) if found.decays_by_channel else ("gated_delta_rule", GATED_DELTA_RULE)
    output = _new_output(build, found)
    build.call(op, query, key, value, decays, share, output, False, layer_id, state_id)
    return name, output


def _new_output(build: Operands, found: Recurrence) -> fx.Node:
    shape = (build.step.rows, build.count(found.heads), build.count(found.values))
    return build.made(aten.new_empty.default, shape, dtype=found.reads[0].node.meta["val"].dtype)


def _scan_of_channels(build: Operands, found: Recurrence, layer_id: fx.Node, state_id: int) -> tuple[str, fx.Node]:
    """Mamba-1's scan with a single element for each channel: S = exp(-dt) S + dt x, so that x is what is added, divided by dt."""
    channels, rows = build.count(found.heads), build.step.rows
    dt = build.call(aten.clamp_min.default, build.call(aten.neg.default, build.decays(found)), SHORTEST)
    added = build.call(aten.squeeze.dim, build.float32(build.product(found.of_values, [])), 2)
    x = build.call(aten.div.Tensor, added, dt)
    a, ones = build.made(aten.new_full.default, (channels, 1), -1.0), build.made(aten.new_ones.default, (rows, 1))
    output = build.made(aten.new_empty.default, (rows, channels))
    build.call(MAMBA1_SCAN, x, dt, a, ones, ones, output, layer_id, state_id)
    if found.query:
        output = build.call(aten.mul.Tensor, output, build.call(aten.squeeze.dim, build.product(found.query, []), 2))
    return "mamba1_scan", output


def factors_used(found: Found) -> list[Factor]:
    """All that the op's operands, and what is added to its output, are made of."""
    if isinstance(found, Recurrence):
        more = [factor for read in found.reads for product in read.more for factor in product]
        return [*found.decay, *found.added, *found.query, *(found.share or ()), *more]
    if isinstance(found, ChannelScan):
        return [factor for product in (*found.decay, *found.x) for factor in product]
    return [found.new, *([found.weights] if isinstance(found.weights, Factor) else [])]


def _after_operands(step: StepGraph, found: Found) -> tuple[fx.Node, list[fx.Node]]:
    """The node before which there is all that the op needs, and the nodes before it that need what is read of the state."""
    order = {node: index for index, node in enumerate(step.graph.nodes)}
    first = min((read.node for read in found.reads), key=lambda node: order[node])
    factors = [step.now(factor.node) for factor in factors_used(found) if isinstance(factor.node, fx.Node)]
    anchor = max([first, *(node.next for node in (*factors, step.rows))], key=lambda node: order[node])
    needing = {read.node for read in found.reads}
    earlier = []
    for node in list(order)[: order[anchor]]:
        if any(arg in needing for arg in node.all_input_nodes):
            needing.add(node)
            earlier.append(node)
    return anchor, earlier
