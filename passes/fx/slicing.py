"""Cuts out the subgraph that computes a value, and evaluates it on concrete inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.graph_tools import call, reached, value_of
from paged_attn.passes.fx.memory import Writers, writers_of
from paged_attn.passes.fx.token_data import read_inputs
from paged_attn.passes.fx.vmap_levels import VmapLevels

MAX_NODES = 4000
OPERATION = {torch.float32: 1e-4, torch.float64: 1e-6}  # relative to the largest value: both sides may compute in the graph's dtype
OPERATION_16_BIT = 3e-2
ROUNDINGS = 8  # allowed error of a number in `is_rounded`
MOST_EPS = 1e-2


def ancestors(
    nodes: fx.Node | list[fx.Node],
    user: fx.Node,
    stop: Set[fx.Node] = frozenset(),
    writers: Writers | None = None,
    *,
    through_shapes: bool = True,
) -> list[fx.Node]:
    """The backward slice of these nodes, themselves included, in graph order, with in-place writes to any of its nodes before `user`.

    Args:
        user: where the value is used: a mask may be filled in place after it was made.
        stop: included, but not followed further.
        writers: the graph's, if already known.
        through_shapes: if False, inputs of which only the shape is read are left out, and so are writers of nodes in `stop`.
    """
    writers = writers_of(user.graph.nodes) if writers is None else writers

    def before(node: fx.Node) -> list[fx.Node]:
        sources = () if node in stop else node.all_input_nodes if through_shapes else read_inputs(node)
        changes = () if node in stop and not through_shapes else writers.get(node, ())
        return [*sources, *(writer for writer in changes if writer < user)]

    return sorted(reached([nodes] if isinstance(nodes, fx.Node) else nodes, before))


def evaluate(
    nodes: list[fx.Node], given: Mapping[fx.Node, Any], result: fx.Node, constant: Callable[[fx.Node, Any], Any] | None = None
) -> Any:
    """Runs `nodes` in order, with `given` values for some of them; `constant` may replace a literal argument of a node.

    Raises:
        KeyError: a placeholder that is not in `given`.
    """
    return evaluate_all(nodes, given, constant)[result]


def evaluate_all(
    nodes: list[fx.Node], given: Mapping[fx.Node, Any], constant: Callable[[fx.Node, Any], Any] | None = None
) -> dict[fx.Node, Any]:
    """`evaluate`, returning the values of all nodes."""
    written = writers_of(nodes)
    values = {n: v.clone() if n in written and isinstance(v, Tensor) else v for n, v in given.items()}  # never writes to the model's own

    with torch.no_grad(), VmapLevels() as levels:
        for node in nodes:
            if node in values:
                continue
            levels.before(node)
            args, kwargs = fx.map_arg(node.args, values.__getitem__), fx.map_arg(node.kwargs, values.__getitem__)
            if constant is not None:
                args = tuple(constant(node, a) for a in args)
                kwargs = {name: constant(node, a) for name, a in kwargs.items()}
            if node.op in ("call_function", "call_method"):
                values[node] = call(node, args, kwargs)
            elif node.op == "get_attr":
                values[node] = attribute_of(node)
            else:
                raise KeyError(node)
            levels.after(node)
    return values


def layout_text(value: Any) -> str:
    """Dtype, device, sizes, strides and offset of a tensor; any other value as it prints."""
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {value.device} {value.shape} {value.stride()} {value.storage_offset()}"


def kind_of(nodes: Sequence[fx.Node], told: Mapping[fx.Node, Hashable] | None = None) -> Hashable:
    """Equal for lists of nodes that do the same with inputs of the same layouts, as in layers that are alike.

    Args:
        told: what counts of some of them, in place of what they do.
    """
    numbers = {node: f"%{index}" for index, node in enumerate(nodes)}

    def named(argument: fx.Node) -> str:
        if argument not in numbers:
            numbers[argument] = f"<{len(numbers)}: {layout_text(value_of(argument))}>"
        return numbers[argument]

    def does(node: fx.Node) -> Hashable:
        return node.op, node.target, repr(fx.map_arg((node.args, dict(node.kwargs)), named))

    return tuple(told[node] if told is not None and node in told else does(node) for node in nodes)


def region_behind(result: fx.Node, inside: Callable[[fx.Node], bool], most: int) -> tuple[list[fx.Node], set[fx.Node]] | None:
    """`result` and the nodes that make it, as far as `inside` holds, in graph order, and the nodes where it ends; None if those inside are
    more than `most`."""
    found, ends = set[fx.Node](), set[fx.Node]()
    for node in reached([result], lambda node: node.all_input_nodes if node in found else ()):
        (found if inside(node) else ends).add(node)
        if len(found) > most:
            return None
    return sorted(found), ends


def literals_of(nodes: Sequence[fx.Node]) -> Iterator[float]:
    """The numbers below a million that stand in the nodes' arguments."""
    for node in nodes:
        found: list[Any] = []
        fx.node.map_aggregate((node.args, node.kwargs), found.append)
        for each in found:
            if isinstance(each, int | float) and not isinstance(each, bool) and abs(each) < 1e6:
                yield float(each)


def epsilons_of(nodes: Sequence[fx.Node]) -> list[float]:
    """The numbers in the nodes' arguments that a norm may add before its root, ascending."""
    return sorted({number for number in literals_of(nodes) if 0 < number <= MOST_EPS})


def attribute_of(node: fx.Node) -> Any:
    """The value of a get_attr node."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def operation_limit(expected: Tensor, *dtypes: torch.dtype) -> float:
    """The largest allowed absolute error when a pass replaces an operation that was computed in these dtypes. For whole models and their
    rows see `paged_attn.tolerances`."""
    return float(expected.nan_to_num().abs().max()) * max(OPERATION.get(dtype, OPERATION_16_BIT) for dtype in dtypes)


def is_rounded(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether numbers differ from `expected`, in float64 and of the same shape, by a few roundings of the dtype at most."""
    limit = torch.finfo(dtype)
    return bool(((got.double() - expected).abs() <= ROUNDINGS * limit.eps * expected.abs() + limit.smallest_normal).all())
