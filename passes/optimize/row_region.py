"""The part of a graph whose values are read only by certain nodes, and which computes each row of tokens independently of the others.

Which operations treat rows independently: row i of the result depends only on row i of the operands and on values without rows. Anything
that is not in these tables is assumed to mix rows. Here every operand has at most one axis of rows, and so must the result. So broadcast
operands and products can only have been combined row by row, and a sum over rows would have left no such axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import SymFloat, SymInt, Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.passes.fx.graph_tools import argument_of, name_of, value_of
from paged_attn.passes.fx.memory import bases_of, writes_in_place, written_values
from paged_attn.passes.fx.row_layout import SIZES, Rows, has_rows, moved_rows, plain_rows, reads_sizes, row_axis

Layout = Rows | str | tuple[Rows, ...]

_ELEMENTWISE = set("""
    abs absolute add sub subtract mul multiply div divide truediv true_divide floordiv floor_divide pow rsub neg negative exp exp2 expm1 log
    log2 log10 log1p sqrt rsqrt square reciprocal sin cos tanh tan atan sigmoid silu gelu relu relu6 leaky_relu elu selu celu softplus mish
    softsign hardswish hardsigmoid hardtanh logsigmoid log_sigmoid erf erfc sign floor ceil round trunc clamp clamp_min clamp_max clip
    maximum minimum fmax fmin where masked_fill lerp addcmul addcdiv eq ne lt le gt ge logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_not and_ or_ invert remainder fmod mod isnan isinf isfinite nan_to_num threshold positive
    to float half bfloat16 double int long bool type type_as contiguous clone detach dropout zeros_like ones_like full_like empty_like
    iadd isub imul itruediv add_ sub_ mul_ div_ masked_fill_ clamp_ clamp_min_ clamp_max_ exp_ neg_ sigmoid_ tanh_ relu_
""".split())  # fmt: skip
_REDUCING = set("sum mean prod amax amin max min var std var_mean norm vector_norm logsumexp any all argmax argmin".split())
_PRODUCTS = set("linear matmul mm bmm addmm baddbmm".split())
_MOVING = set("""
    view reshape flatten unflatten transpose t permute squeeze unsqueeze expand expand_as view_as reshape_as select narrow slice getitem
    chunk split split_with_sizes unbind tensor_split movedim moveaxis swapaxes swapdims repeat repeat_interleave tile cat concat stack roll
    flip broadcast_to unfold
""".split())  # fmt: skip
# (position of the argument for the dim along which they compute, its default).
_ALONG: dict[str, tuple[int, int | None]] = {
    "softmax": (1, None), "log_softmax": (1, None), "cumsum": (1, None), "cumprod": (1, None), "sort": (1, -1), "argsort": (1, -1),
    "topk": (2, -1), "glu": (1, -1), "normalize": (2, 1), "gather": (1, None), "scatter": (1, None), "scatter_": (1, None),
}  # fmt: skip
_NORMS = {"layer_norm", "rms_norm"}
_SAME_SIZES = {"gather", "scatter", "scatter_"}


def is_known(node: fx.Node) -> bool:
    """Whether an operation may treat rows separately."""
    name = name_of(node)
    tables = (_ELEMENTWISE, _REDUCING, _PRODUCTS, _MOVING, _ALONG, _NORMS, {"embedding"})
    return any(name in table for table in tables) or reads_sizes(node) or node.target is EXPERTS


def is_moving(node: fx.Node) -> bool:
    """Whether a known operation computes nothing."""
    return reads_sizes(node) or name_of(node) in _MOVING | {"contiguous", "detach"}


def layout_of(node: fx.Node, given: Mapping[fx.Node, Layout], tokens: Any) -> Layout | None:
    """The layout of rows in a node's value; None unless it is proved that rows stay separate.

    Args:
        given: the layouts of all operands that have rows.
    """
    if not given:
        return None
    first = node.args[0] if node.args else None
    if isinstance(first, fx.Node) and isinstance(parts := given.get(first), tuple):
        taken = node.args[1] if name_of(node) == "getitem" else None
        return parts[taken] if isinstance(taken, int) and -len(parts) <= taken < len(parts) else None
    rows = {each: layout for each, layout in given.items() if isinstance(layout, Rows)}
    if node.target is EXPERTS:
        return _kept(node, rows, tokens) if set(rows) == set(given) == set(node.args[:3]) and _are_of_one_kind(rows) else None
    if len(rows) != len(given) or not _is_of_torch(node.target) or "out" in node.kwargs or _has_literal(node, (SymInt, SymFloat)):
        return None
    if reads_sizes(node):
        return SIZES
    name, operands = name_of(node), [each for each in node.all_input_nodes if isinstance(value_of(each), Tensor)]
    if name in _MOVING:
        moved: Layout | None = moved_rows(node, rows, tokens) if len(operands) == len(rows) else None
        return moved
    if len(operands) != len(node.all_input_nodes) or not _are_of_one_kind(rows):
        return None  # among others, numbers that depend on T
    if name == "dropout" and argument_of(node, 2, "training") is not False:
        return None
    if name in _ELEMENTWISE | _PRODUCTS and not _has_literal(node, (True,)):  # inplace=True, or another unsupported flag
        return _kept(node, rows, tokens)
    if name in _REDUCING or (name == "embedding" and _is_plain_lookup(node, rows)) or (name in _NORMS and _is_of_last(node, rows)):
        return _kept(node, rows, tokens)
    return _kept(node, rows, tokens) if name in _ALONG and _is_along_another(node, name, rows, operands) else None


def _are_of_one_kind(rows: Mapping[fx.Node, Rows]) -> bool:
    return len({layout.kind for layout in rows.values()}) == 1


def _kept(node: fx.Node, rows: Mapping[fx.Node, Rows], tokens: Any) -> Layout | None:
    """The operands' layout, on the one axis of the result that has as many rows."""
    layout, value = next(iter(rows.values())), value_of(node)
    several = isinstance(value, (tuple, list))
    found = []
    for part in value if several else (value,):
        axis = row_axis(part, tokens)
        if axis is None or axis[1] != layout.before * layout.after:
            return None
        found.append(Rows(axis[0], *layout.kind))
    return tuple(found) if several else found[0]


def _is_of_torch(target: Any) -> bool:
    if isinstance(target, str):
        return True
    if isinstance(target, OpOverload):
        return target.namespace == "aten"
    module = getattr(target, "__module__", None) or "torch"
    return module.split(".")[0] in ("torch", "_operator", "math") and not isinstance(target, HigherOrderOperator)


def _has_literal(node: fx.Node, wanted: tuple[Any, ...]) -> bool:
    """Whether a node's arguments contain one of these values, or a value of one of these types."""
    found: list[bool] = []

    def look(argument: Any) -> Any:
        found.append(any(isinstance(argument, w) if isinstance(w, type) else argument is w for w in wanted))
        return argument

    fx.node.map_aggregate((node.args, dict(node.kwargs)), look)
    return any(found)


def _is_plain_lookup(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> bool:
    """Whether it is an embedding lookup without max_norm, which would write to the table."""
    return len(rows) == 1 and argument_of(node, 3, "max_norm") is None and not _has_literal(node, (True,))


def _is_of_last(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> bool:
    """Whether it normalizes over last dims that are not rows, with weights that have no rows."""
    shape = argument_of(node, 1, "normalized_shape")
    (layout, *others), source = rows.values(), node.args[0] if node.args else None
    if others or source not in rows or not isinstance(shape, (tuple, list)):
        return False
    return all(isinstance(size, int) for size in shape) and layout.axis < value_of(source).dim() - len(shape)


def _is_along_another(node: fx.Node, name: str, rows: Mapping[fx.Node, Rows], operands: list[fx.Node]) -> bool:
    """Whether its dim is known and is not the dim of the rows in any operand."""
    dim = argument_of(node, _ALONG[name][0], "dim", _ALONG[name][1])
    if not isinstance(dim, int) or isinstance(dim, bool) or (name in _SAME_SIZES and len(rows) != len(operands)):
        return False
    if name not in _SAME_SIZES and len(rows) != 1:
        return False
    dims = {value_of(each).dim() for each in rows}
    axes = {layout.axis for layout in rows.values()}
    return len(dims) == 1 and len(axes) == 1 and dim % dims.pop() != axes.pop()


@dataclass(frozen=True)
class RowRegion:
    """Nodes that treat rows separately, with the layout of their rows, in graph order; and the inputs from outside that have rows.

    Every frontier value has one axis of T rows, and nothing writes to it while the region reads it.
    """

    layouts: dict[fx.Node, Any]
    frontier: dict[fx.Node, Rows]

    def users_of(self, value: fx.Node) -> list[fx.Node]:
        """The users of a value inside the region."""
        return [user for user in self.layouts if value in user.all_input_nodes]

    @property
    def writes(self) -> bool:
        return any(writes_in_place(node) for node in self.layouts)


def find_row_region(graph: fx.Graph, readers: set[fx.Node], tokens: Any) -> RowRegion:
    """The largest region whose values only `readers` use."""
    refused = {node for node in graph.nodes if not is_known(node)}
    while True:
        wanted = _only_for(graph, readers, refused)
        layouts, frontier = dict[fx.Node, Any](), dict[fx.Node, Rows]()
        mixing = set[fx.Node]()
        for node in wanted:
            given = _given(node, layouts, tokens)
            layout = None if given is None else layout_of(node, given, tokens)
            if layout is None:
                mixing.add(node)
            else:
                assert given is not None
                layouts[node] = layout
                frontier.update((each, rows) for each, rows in given.items() if each not in layouts)
        region = RowRegion(layouts, frontier)
        mixing |= set() if mixing else _read_around_writes(graph, region, readers)
        if not mixing:
            return region
        refused |= mixing


def _only_for(graph: fx.Graph, readers: set[fx.Node], refused: set[fx.Node]) -> list[fx.Node]:
    """The nodes that are read, and whose results are written to, only by `readers` and each other."""
    last = max(readers)
    kept = {
        node
        for node in graph.nodes
        if node < last and node.op in ("call_function", "call_method") and node not in refused and node not in readers
    }  # fmt: skip
    while True:
        inside = kept | readers
        lost = {node for node in kept if not all(user in inside for user in node.users) or not (node.users or writes_in_place(node))}
        lost |= {node for node in kept if not _writes_inside(node, kept)}
        if not lost:
            return sorted(kept)
        kept -= lost


def _writes_inside(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether everything that a node changes was made inside; the result of dropout may be its operand itself."""
    return all(value in inside and name_of(value) != "dropout" for value in written_values(node) - {node})


def _given(node: fx.Node, layouts: Mapping[fx.Node, Any], tokens: Any) -> dict[fx.Node, Any] | None:
    """The layouts of a node's operands that have rows; None if one of them has rows other than along one axis."""
    given = dict[fx.Node, Any]()
    for each in node.all_input_nodes:
        value = value_of(each)
        if each in layouts:
            given |= {} if layouts[each] is SIZES else {each: layouts[each]}
        elif value is None:
            return None
        elif has_rows(value, tokens):
            rows = plain_rows(value, tokens) if not reads_sizes(node) else None  # N must not be read off a tensor of T rows
            if rows is None:
                return None
            given[each] = rows
    return given


def _read_around_writes(graph: fx.Graph, region: RowRegion, readers: set[fx.Node]) -> set[fx.Node]:
    """Nodes that read a frontier value before a write from outside, if that write comes before the region's end."""
    last = max(readers)
    writers = [node for node in graph.nodes if node not in region.layouts and node < last and writes_in_place(node)]
    found = set[fx.Node]()
    for value in region.frontier:
        users, bases = region.users_of(value), bases_of([value])
        for writer in writers if any(min(users) < writer for writer in writers) else ():
            found.update(user for user in users if user < writer and written_values(writer) & bases)
    return found
