"""Find the rotary embedding between projections and attention, however it is spelled.

From what attention reads, a walk back over sums, products and moves of elements comes to nodes through which all that is taken from the
tokens passes. The nearest of these of which the rest is a rotation, by cosines and sines made from positions, is what was rotated.
Declines: operations of any other kind in between (a norm after the rotation), values that something else reads too, in-place writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, fx

from paged_attn.attn_ops.positions_op import BATCH_POSITIONS
from paged_attn.passes.call_form import CallForm
from paged_attn.passes.graph_tools import bases_of, symbol, value_of, writes_in_place, written_values
from paged_attn.passes.kv_heads import KVSource, head_layout
from paged_attn.passes.rotation_values import RotationValues, Turn
from paged_attn.passes.token_data import name_of, read_inputs

_MOVES = {
    "getitem", "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "flatten", "unflatten", "expand", "contiguous", "clone",
    "chunk", "split", "split_with_sizes", "unbind", "narrow", "select", "slice", "movedim", "swapaxes", "t", "cat", "concat", "stack",
    "expand_as", "view_as", "reshape_as", "broadcast_to", "repeat_interleave", "repeat", "alias", "to", "type_as", "float", "double",
    "type",
}  # fmt: skip
_SUMS_AND_PRODUCTS = {"add", "sub", "mul", "neg", "rsub", "multiply", "negative", "view_as_complex", "view_as_real", "complex"}
MAX_NODES = 80


class Rotation(NamedTuple):
    """Of one operand: what is rotated, as [T, heads, dim], how, and the nodes that compute it, of which nothing is read elsewhere."""

    source: KVSource
    turn: Turn
    region: frozenset[fx.Node]


class RotationFinder:
    """Finds rotations in one graph.

    Args:
        values: the real tensor (or number) behind each placeholder.
    """

    def __init__(self, graph: fx.Graph, form: CallForm, values: Mapping[fx.Node, Any]) -> None:
        self.form = form
        positions = frozenset(_position_nodes(graph, form))
        calls = [node for node, role in form.roles.items() if role not in ("owned", "tokens", "num_logits", "position_ids")]
        self._of_tokens = _made_from(graph, calls)
        self._of_positions = _made_from(graph, positions) - self._of_tokens
        self._values = RotationValues(graph, form, values, positions)
        self._changing = _made_from(graph, self._values.writers.keys() - positions)
        self._first: dict[Any, fx.Node] = {}

    def find(self, operand: fx.Node, user: fx.Node, heads: int, dim: int) -> Rotation | None:
        """The rotation whose result is `operand` [T, heads, dim] of the attention `user`."""
        for start, region in self._narrowings(operand):
            inputs = {source for node in region for source in read_inputs(node) if source in self._of_positions}
            if not inputs:
                continue
            source = self._source(start, heads, dim)
            same_type = source is not None and value_of(start).dtype == _dtype_of(operand)
            for through_columns in (True, False) if source is not None and same_type else ():
                roots: dict[fx.Node, set[fx.Node]] = {}
                for root in sorted({self._root(node, through_columns) for node in inputs}):
                    roots.setdefault(self._first_equal(root), set()).add(root)
                turn = self._values.turn(source, operand, user, roots) if self._are_angles(list(roots)) else None  # type: ignore[arg-type]
                if turn is not None:
                    fit = self._is_alone(region, user) and not self._is_written(start, turn, region, user)
                    return Rotation(source, turn, region) if fit else None  # type: ignore[arg-type]
        return None

    def _narrowings(self, operand: fx.Node) -> Iterator[tuple[fx.Node, frozenset[fx.Node]]]:
        """The nodes through which all passes that `operand` takes from the tokens, nearest first, with what lies behind each."""
        region, pending = set[fx.Node](), {operand}
        while pending and len(region) < MAX_NODES:
            latest = max(pending)
            if len(pending) == 1 and region:
                yield latest, frozenset(region)
            if name_of(latest) not in _MOVES | _SUMS_AND_PRODUCTS or writes_in_place(latest):
                return
            pending.remove(latest)
            region.add(latest)
            pending.update(source for source in read_inputs(latest) if source in self._of_tokens)

    def _source(self, start: fx.Node, heads: int, dim: int) -> KVSource | None:
        """How `start` is read as [T, heads, dim]."""
        layout = head_layout(start, dim, self.form) if isinstance(value_of(start), Tensor) else None
        if layout is None or layout[2] % heads:
            return None
        return KVSource(start, *layout, layout[2] // heads)

    def _root(self, node: fx.Node, through_columns: bool) -> fx.Node:
        """The earliest node with the same angles, which layers may share: views, repetitions and casts to the same type are undone.

        `through_columns`: also slices of the last dim, unless one tensor holds both cosines and sines.
        """
        root = node
        while name_of(node) in _MOVES:
            sources = [source for source in read_inputs(node) if source in self._of_positions]
            if len(sources) != 1 or not isinstance(value_of(sources[0]), Tensor) or value_of(sources[0]).dtype != _dtype_of(node):
                break
            if bases_of(sources) & self._values.writers.keys():  # filled in place: only what is made from it afterwards counts
                break
            widths = [symbol(value_of(each).shape[-1]) for each in (node, sources[0])]  # SymInts would install a guard
            if not through_columns and all(isinstance(width, int) for width in widths) and widths[0] < widths[1]:
                break
            node = sources[0]
            root = node if self._is_table(node) else root
        return root

    def _is_table(self, node: fx.Node) -> bool:
        """[.., T, .., n], all else of size 1."""
        value = value_of(node)
        sizes = [symbol(size) for size in value.shape] if isinstance(value, Tensor) else []
        return [size for size in sizes[:-1] if size != 1] == [self.form.num_tokens] and isinstance(sizes[-1], int)

    def _are_angles(self, roots: list[fx.Node]) -> bool:
        """Two tables of real numbers alike, or a complex one."""
        if not roots or not all(self._is_table(root) for root in roots):
            return False
        kinds = {(value_of(root).dtype, value_of(root).shape[-1]) for root in roots}
        wanted = 1 if value_of(roots[0]).dtype.is_complex else 2
        return len(roots) == wanted and len(kinds) == 1 and (wanted == 1 or value_of(roots[0]).dtype.is_floating_point)

    def _first_equal(self, node: fx.Node) -> fx.Node:
        """The first node that computes the same of the same: q and k, and all layers, may each compute their angles for themselves."""
        if node.op == "placeholder" or node in self._of_tokens or node in self._changing:
            return node
        inputs = fx.map_arg((node.args, dict(node.kwargs)), self._first_equal)
        return self._first.setdefault((node.op, node.target, repr(inputs)), node)

    def _is_alone(self, region: frozenset[fx.Node], user: fx.Node) -> bool:
        """Whether nobody reads the region's numbers but the attention, once."""
        readers = [other for node in region for other in node.users if other not in region and node in read_inputs(other)]
        return readers == [user]

    def _is_written(self, start: fx.Node, turn: Turn, region: frozenset[fx.Node], user: fx.Node) -> bool:
        """Whether something that the rotation reads, or makes, changes before attention takes it."""

        def is_written(values: Iterable[fx.Node], after: fx.Node) -> bool:
            writers = (writer for value in values for writer in self._values.writers.get(value, ()))
            return any(after < writer < user for writer in writers)

        return is_written(bases_of([start]) | region, min(region)) or any(is_written(bases_of([n]), n) for n in (turn.cos, turn.sin))


def _position_nodes(graph: fx.Graph, form: CallForm) -> list[fx.Node]:
    if form.positions is not None:
        return [form.positions]
    return [node.args[0] for node in graph.nodes if node.target is BATCH_POSITIONS]


def _made_from(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Every node whose numbers depend on those of `sources`, themselves included."""
    found, before = set(sources), 0
    while len(found) != before:
        before = len(found)
        for node in graph.nodes:
            if any(source in found for source in read_inputs(node)):
                found.add(node)
                found |= written_values(node) if writes_in_place(node) else set()
    return found


def _dtype_of(node: fx.Node) -> Any:
    """Also of views that passes have made, which hold no value."""
    while not isinstance(value_of(node), Tensor) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return getattr(value_of(node), "dtype", None)
