"""Puts an op on slots into the graph of a layer's step, in the place of what updates and reads a state."""

from __future__ import annotations

import math

import torch
from torch import fx

from paged_attn.attn_ops.ops.scans import LINEAR_ATTENTION, MAMBA1_SCAN
from paged_attn.recurrent.inline.dims import sizes
from paged_attn.recurrent.inline.find import Recurrence
from paged_attn.recurrent.inline.operands import Operands
from paged_attn.recurrent.inline.step_graph import StepGraph
from paged_attn.recurrent.program import NoOpFits, StateLayout

aten = torch.ops.aten
WIDEST = 32  # times a token's own width: as much as Mamba's discretized matrices
SHORTEST = 1e-20  # a time step that decays nothing, and by which numbers can still be divided


def refuse_wide(step: StepGraph, found: Recurrence) -> None:
    """Raises NoOpFits if a token's keys and decays, or its state where that is read as it is, take too much memory."""
    own = math.prod(found.axes[axis] for axis in (*found.heads, *found.keys))
    allowed = WIDEST * max(math.prod(sizes(node)[1:]) for node in step.inputs)
    if own > allowed:
        raise NoOpFits(f"for each token it would need {own:,} keys, decays or elements of its state; allowed are {allowed:,}")


def layout_of(found: Recurrence) -> StateLayout:
    ones = [axis for axis in range(len(found.shape)) if axis not in found.axes]
    order = [*ones, *found.heads, *found.keys, *found.values]
    return StateLayout(found.shape, tuple(order), len(ones) + len(found.heads), len(found.keys))


def insert_op(step: StepGraph, found: Recurrence, layer_id: fx.Node, state_id: int) -> str:
    """From now on what is read of the state is the output of an op, whose name this returns."""
    build = Operands(step, found)
    with step.graph.inserting_before(_after_operands(step, found)):
        if found.summed:
            name, output = "linear_attention", _linear_attention(build, found, layer_id, state_id)
        else:
            name, output = "mamba1_scan", _scan_of_channels(build, found, layer_id, state_id)
        results = [build.as_read(output, read.dims, read.node) for read in found.reads]
    for read, result in zip(found.reads, results, strict=True):
        result.meta = read.node.meta
        read.node.replace_all_uses_with(result)
        step.replaced[read.node] = result
    return name


def _linear_attention(build: Operands, found: Recurrence, layer_id: fx.Node, state_id: int) -> fx.Node:
    query, key = (build.product(factors, found.keys) for factors in (found.query, build.of_keys))
    value, decays = build.product(build.of_values, found.values), build.decays()
    shape = (build.step.rows, build.count(found.heads), build.count(found.values))
    output = build.made(aten.new_empty.default, shape, dtype=found.reads[0].node.meta["val"].dtype)
    build.call(LINEAR_ATTENTION, query, key, value, decays, output, layer_id, state_id)
    return output


def _scan_of_channels(build: Operands, found: Recurrence, layer_id: fx.Node, state_id: int) -> fx.Node:
    """Mamba-1's scan with a single element for each channel: S = exp(-dt) S + dt x, so that x is what is added, divided by dt."""
    channels, rows = build.count(found.heads), build.step.rows
    dt = build.call(aten.clamp_min.default, build.call(aten.neg.default, build.decays()), SHORTEST)
    added = build.call(aten.squeeze.dim, build.float32(build.product(build.of_values, [])), 2)
    x = build.call(aten.div.Tensor, added, dt)
    a, ones = build.made(aten.new_full.default, (channels, 1), -1.0), build.made(aten.new_ones.default, (rows, 1))
    output = build.made(aten.new_empty.default, (rows, channels))
    build.call(MAMBA1_SCAN, x, dt, a, ones, ones, output, layer_id, state_id)
    if not found.query:
        return output
    return build.call(aten.mul.Tensor, output, build.call(aten.squeeze.dim, build.product(found.query, []), 2))


def _after_operands(step: StepGraph, found: Recurrence) -> fx.Node:
    """The node after the last one that the op's operands need; the first that reads the state, as a rule."""
    order = {node: index for index, node in enumerate(step.graph.nodes)}
    first = min((read.node for read in found.reads), key=lambda node: order[node])
    factors = [step.now(factor.node) for factor in (*found.decay, *found.added, *found.query) if isinstance(factor.node, fx.Node)]
    last = max([first, *factors], key=lambda node: order[node])
    return first if last is first else last.next
