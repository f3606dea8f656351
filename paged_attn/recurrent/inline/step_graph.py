"""A recurrent layer's step of one token for each row of a batch, as a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from paged_attn.attn_ops.model_code import model_code
from paged_attn.calling.left_as_it_was import left_as_it_was
from paged_attn.passes.fx.memory import writes_in_place
from paged_attn.recurrent.inline.traced.last_columns import with_last_columns
from paged_attn.recurrent.inline.traced.parts import into_parts
from paged_attn.recurrent.inline.traced.repeated_weights import without_repeated_weights
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.program import NoOpFits, Part

TRACED_ROWS = 8191  # a prime, so that no other size is a multiple of it
aten = torch.ops.aten


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Any:
    """With each operand once, unlike torch's, in which what is subtracted from the end depends on the start."""
    return start * (1 - weight) + end * weight


def _copy(onto: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """Without what was there before."""
    return source.to(onto.dtype).expand_as(onto)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *form: Any) -> Any:
    """The bias by itself."""
    if bias is None:
        return NotImplemented
    return aten.convolution.default(x, weight, None, *form) + bias.view(-1, *[1] * (x.dim() - 2))


DECOMPOSED: Any = {
    **get_decompositions([aten.addcmul, aten.addcdiv, aten.baddbmm]),
    aten.lerp.Scalar: _lerp, aten.lerp.Tensor: _lerp, aten.copy.default: _copy, aten.convolution.default: _convolution,
}  # fmt: skip


@dataclass
class StepGraph:
    """Placeholders: the layer's inputs [rows, 1, ...], its states [rows, ...], and the tensors of its module; the result is a tuple: its
    output [rows, 1, ...], then the new states.

    Attributes:
        graph: each node has its value on fake tensors of `TRACED_ROWS` rows in meta["val"].
        inputs, states: placeholders, in the order of the layer's operands and of its states; `parts`: what each of `states` is.
        owned: placeholder -> the path of the module's tensor.
        rows: the node of the number of rows.
        replaced: what read a state -> the node that has it of an op.
    """

    graph: fx.Graph
    inputs: list[fx.Node]
    states: list[fx.Node]
    owned: dict[fx.Node, str]
    rows: fx.Node
    parts: list[Part]
    replaced: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def now(self, node: fx.Node) -> fx.Node:
        """A node of the graph as it was traced, or what is in its place."""
        return self.replaced.get(node, node)

    @property
    def output(self) -> fx.Node:
        return self.graph.output_node()

    @property
    def results(self) -> tuple[fx.Node, ...]:
        return self.output.args[0]  # type: ignore[return-value]


def step_graph(layer: RecurrentLayer) -> StepGraph:
    """Traces `layer.step` with the states of running requests, in inference mode of the caller.

    Raises:
        NoOpFits: it cannot be traced for any number of rows, or reads a tensor that is not its module's.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    count = len(layer.operands)

    def fake(one: Tensor) -> Tensor:
        with mode:
            return torch.empty(TRACED_ROWS, *one.shape[1:], dtype=one.dtype, device=one.device)

    def step(*given: Tensor) -> tuple[Tensor, ...]:
        output, after = layer.step(list(given[:count]), list(given[count:]))
        return output, *after

    device = layer.given[0].device
    empty = [torch.zeros(1, *state.shape, dtype=state.dtype, device=device) for state in layer.spec.states]
    failed = model_code(lambda why: NoOpFits(f"the graph of its step cannot be traced: {why}"))
    with failed, left_as_it_was(layer.module), torch.no_grad():  # what it keeps of this call has no numbers
        given = [fake(one) for one in (*(value[:, :1] for value in layer.given), *empty)]
        with mode:
            traced = _traced(step, given)
            if any(writes_in_place(node) for node in traced.graph.nodes):
                traced = _traced(functionalize(traced, remove="mutations"), given)  # not of the step, which may have autograd functions
    graph = traced.graph
    for node in list(graph.nodes):
        if writes_in_place(node) and node.args[0] in graph.find_nodes(op="placeholder"):
            graph.erase_node(node)  # a step's own tensors, which nobody reads afterwards
    _without_stacks(graph)
    placeholders = list(graph.find_nodes(op="placeholder"))
    owned = _owned(traced, layer.module)
    _as_linears(graph)
    states, parts = into_parts(graph, placeholders[count:])
    with_last_columns(graph)
    without_repeated_weights(graph, TRACED_ROWS)
    rows = _for_any_rows(graph)
    return StepGraph(graph, placeholders[:count], states, owned, rows, parts)


def _traced(step: Callable[..., Any], given: Sequence[Tensor]) -> fx.GraphModule:
    return make_fx(step, DECOMPOSED, tracing_mode="real", _allow_non_fake_inputs=True)(*given)


def _without_stacks(graph: fx.Graph) -> None:
    """What is read of a tensor into which it was just put (a stack of all layers' states) is what was put there."""
    for node in list(graph.nodes):
        if node.target is not aten.select.int:
            continue
        stack, dim, index = node.args
        dim %= stack.meta["val"].dim()
        if stack.target is aten.select_scatter.default and (stack.args[2] % stack.meta["val"].dim(), stack.args[3]) == (dim, index):
            node.replace_all_uses_with(stack.args[1])
        elif stack.target is aten.cat.default and index >= 0 and _dim_of_cat(stack) == dim:
            parts = [part for part in stack.args[0] for _ in range(part.meta["val"].shape[dim])]
            if parts[index].meta["val"].shape[dim] == 1:
                with graph.inserting_before(node):
                    part = graph.call_function(aten.squeeze.dim, (parts[index], dim))
                part.meta = node.meta
                node.replace_all_uses_with(part)
    graph.eliminate_dead_code()


def _dim_of_cat(node: fx.Node) -> int:
    """Along which the parts of a cat lie, counted from the first."""
    given: Any = node.args[1] if len(node.args) > 1 else 0
    return int(given) % int(node.meta["val"].dim())


def _for_any_rows(graph: fx.Graph) -> fx.Node:
    """Every number that the traced number of rows divides becomes that multiple of the number of rows, whose node this returns."""
    *_, last = graph.find_nodes(op="placeholder")
    first = next(iter(graph.nodes))
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    with graph.inserting_after(last):
        rows = graph.call_function(aten.sym_size.int, (first, 0))
    rows.meta["val"] = TRACED_ROWS
    multiples = {1: rows}

    def of_rows(value: Any) -> Any:
        if type(value) is not int or value == 0 or value % TRACED_ROWS:
            return value
        times = value // TRACED_ROWS
        if times not in multiples:
            with graph.inserting_after(rows):
                multiples[times] = graph.call_function(operator.mul, (rows, times))
            multiples[times].meta["val"] = value
        return multiples[times]

    for node in nodes:
        node.args, node.kwargs = (tree_map_only(int, of_rows, each) for each in (node.args, node.kwargs))
    return rows


def _owned(traced: fx.GraphModule, module: nn.Module) -> dict[fx.Node, str]:
    """Turns the tensors that the graph holds into placeholders."""
    paths = paths_of(module)
    owned, seen = dict[fx.Node, str](), dict[int, fx.Node]()
    last = [*traced.graph.find_nodes(op="placeholder")][-1]
    for node in list(traced.graph.find_nodes(op="get_attr")):
        tensor = operator.attrgetter(str(node.target))(traced)
        if id(tensor) not in paths:
            raise NoOpFits(f"it reads a tensor {list(tensor.shape)} that is neither its module's nor computed from its inputs")
        if id(tensor) not in seen:
            with traced.graph.inserting_after(last):
                last = seen[id(tensor)] = traced.graph.placeholder(f"owned_{len(seen)}")
            last.meta["val"] = node.meta.get("val", tensor)
            owned[last] = paths[id(tensor)]
        node.replace_all_uses_with(seen[id(tensor)])
        traced.graph.erase_node(node)
    return owned


def paths_of(module: nn.Module) -> dict[int, str]:
    """The id of each tensor that a module or one inside it holds -> its path."""
    paths: dict[int, str] = {}
    for where, part in module.named_modules():
        for table in (part._parameters, part._buffers, vars(part)):
            paths.update({id(value): f"{where}.{name}".lstrip(".") for name, value in table.items() if isinstance(value, Tensor)})
    return paths


def _as_linears(graph: fx.Graph) -> None:
    """Products with a transposed weight are linear layers again, as other passes look for them."""
    for node in list(graph.nodes):
        if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
            continue
        *bias, rows, turned = node.args
        if not (isinstance(turned, fx.Node) and turned.target is aten.t.default):
            continue
        with graph.inserting_before(node):
            linear = graph.call_function(F.linear, (rows, turned.args[0], *bias))
        linear.meta = node.meta
        node.replace_all_uses_with(linear)
        graph.erase_node(node)
    graph.eliminate_dead_code()
