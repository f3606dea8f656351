"""Makes a layer's program: the graph of one token's step for all rows, with ops on slots in the place of its recurrences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, fx, nn

from paged_attn.attn_ops.model_code import model_code
from paged_attn.recurrent.inline.find.channels import ChannelScan, channel_scan_of
from paged_attn.recurrent.inline.find.linear import depending_on, recurrence_of
from paged_attn.recurrent.inline.find.windows import window_of
from paged_attn.recurrent.inline.insert import Found, factors_used, insert_op, layout_of, refuse_wide
from paged_attn.recurrent.inline.starts import starts_of
from paged_attn.recurrent.inline.step_graph import StepGraph, step_graph
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.program import NoOpFits, Program

logger = logging.getLogger("paged_attn")


def with_program(layer: RecurrentLayer) -> RecurrentLayer:
    """The layer with its program, and with the states of its ops. Raises as `program_of`."""
    with model_code(lambda why: NoOpFits(f"the graph of its step cannot be read: {why}")):
        program = program_of(layer)
    states = tuple(layout.spec(layer.spec.states) for layout in program.states)
    return replace(layer, spec=replace(layer.spec, states=states), program=program)


def program_of(layer: RecurrentLayer) -> Program:
    """The program of a layer; nothing is proved yet.

    Raises:
        NoOpFits: one of its states is not a recurrence that an op computes.
    """
    if not layer.batches:
        raise NoOpFits("it takes no batch of requests")
    step = step_graph(layer)
    graph = step.graph
    with graph.inserting_before(step.inputs[0]):
        layer_id = graph.placeholder("layer_id")
    found = [_found(step, index) for index in range(len(step.states))]
    layouts = [layout_of(each, part) for each, part in zip(found, step.parts, strict=True)]
    maxima = [part.state for part, each in zip(step.parts, found, strict=True) if isinstance(each, ChannelScan) and each.maximum]
    starts = starts_of(layer, maxima)
    order = _in_order(step, found)
    names = {index: insert_op(step, found[index], layer_id, index, starts[step.parts[index].state]) for index in order}
    step.output.args = (step.results[0],)
    graph.eliminate_dead_code()
    if any(node.users for node in step.states):
        raise NoOpFits("its states are read in other ways than by its recurrences")
    lines = [operand.form == "line" and bool(node.users) for operand, node in zip(layer.operands, step.inputs, strict=True)]
    if any(lines) and not layer.mapped:
        raise NoOpFits(f"it is given {layer.operands[lines.index(True)].name} once for all requests")
    taken = [index for index, node in enumerate(step.inputs) if node.users or node is step.inputs[0]]
    for node in (*step.states, *(node for index, node in enumerate(step.inputs) if index not in taken)):
        graph.erase_node(node)
    for node in [node for node in step.owned if not node.users]:
        graph.erase_node(node)
    owned = [path for node, path in step.owned.items() if not node._erased]
    graph.lint()
    module = fx.GraphModule(nn.Module(), graph)
    ops = tuple(names[index] for index in range(len(found)))
    return Program(_function(module), tuple(taken), tuple(owned), ops, tuple(layouts), layer.spec, module.code)


def _found(step: StepGraph, index: int) -> Found:
    try:
        found = recurrence_of(step, index)
        refuse_wide(step, found)
        return found
    except NoOpFits as first:
        reason = first
    for other in (window_of, channel_scan_of):
        try:
            return other(step, index)
        except NoOpFits as why:
            logger.debug("state %d: %s", index, why)
    raise reason


def _in_order(step: StepGraph, found: Sequence[Found]) -> list[int]:
    """The states in such an order that what each is made of is known before it.

    Raises:
        NoOpFits: there is none.
    """
    nodes = [{factor.node for factor in factors_used(each)} for each in found]
    dependent = [depending_on(step.graph, [state]) for state in step.states]
    order = list[int]()
    while len(order) < len(found):
        left = [index for index in range(len(found)) if index not in order]
        ready = [index for index in left if not any(nodes[index] & dependent[other] for other in left if other != index)]
        if not ready:
            raise NoOpFits("each of its states is made of what another one returns")
        order += ready
    return order


def _function(module: fx.GraphModule) -> Callable[..., Tensor]:
    forward = type(module).forward
    return lambda *given: forward(module, *given)
