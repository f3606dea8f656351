"""The part of a graph whose values are read only by certain nodes, and which computes each row of tokens independently of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from paged_attn.passes.fx.graph_tools import bases_of, name_of, value_of, writes_in_place, written_values
from paged_attn.passes.fx.row_layout import SIZES, Rows, has_rows, plain_rows, reads_sizes
from paged_attn.passes.optimize.logits_gather.row_ops import is_known, layout_of


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
