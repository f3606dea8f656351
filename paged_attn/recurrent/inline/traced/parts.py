"""States whose parts are stepped one by one, such as the state of each head in a loop over heads: each part is a state of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from paged_attn.recurrent.program import Part

aten = torch.ops.aten
_JOINED = (aten.cat.default, aten.stack.default)


def into_parts(graph: fx.Graph, states: Sequence[fx.Node]) -> tuple[list[fx.Node], list[Part]]:
    """Placeholders of the states [rows, ...], where those that are read and written part by part are replaced by their parts, and what
    each is; the graph's results change accordingly."""
    found, parts = list[fx.Node](), list[Part]()
    output = graph.output_node()
    for index, state in enumerate(states):
        place = 1 + len(found)
        results = _results(output)
        split = _Split.of(state, results[place], (*results[:place], *results[place + 1 :]))
        if split is None:
            found.append(state)
            parts.append(Part(index))
            continue
        placeholders, after = split.made(graph, results[place])
        results = _results(output)
        output.args = ((*results[:place], *after, *results[place + 1 :]),)
        found += placeholders
        parts += [Part(index, split.dim, at) for at in range(len(placeholders))]
    graph.eliminate_dead_code()
    for state in states:
        if state not in found:
            graph.erase_node(state)
    return found, parts


def _results(output: fx.Node) -> tuple[fx.Node, ...]:
    return output.args[0]  # type: ignore[return-value]


class _Split:
    """A state that is taken apart along `dim`: `held` has, for each node that is the state, or the state with new parts, its parts, each
    a node, or (int) the old part with this index; `taken`: for each node that is a part, which one."""

    def __init__(self, state: fx.Node, dim: int) -> None:
        self.state, self.dim = state, dim
        self.held: dict[fx.Node, list[fx.Node | int]] = {state: list(range(state.meta["val"].shape[dim]))}
        self.taken: dict[fx.Node, fx.Node | int] = {}

    @classmethod
    def of(cls, state: fx.Node, new: fx.Node, others: Sequence[fx.Node]) -> _Split | None:
        """None if something else is done with it than taking its parts and putting them back; `others`: the graph's other results."""
        for dim in sorted({_dim(node) for node in state.users if node.target in (aten.select.int, aten.unbind.int)}):
            split = cls(state, dim)
            several = dim > 0 and len(split.held[state]) > 1
            if several and split._follow() and split._ends_in(new) and not split.held.keys() & {*others}:
                return split
        return None

    def _follow(self) -> bool:
        pending = [self.state]
        for whole in pending:
            for node in whole.users:
                if node.op == "output":
                    continue
                if node.target is aten.select_scatter.default and node.args[0] is whole and _dim(node) == self.dim:
                    parts, (_, new, _, at) = list(self.held[whole]), node.args
                    parts[at] = new  # type: ignore[index, assignment]
                    self.held[node] = parts
                    pending.append(node)
                elif node.target is aten.select.int and _dim(node) == self.dim:
                    self.taken[node] = self.held[whole][node.args[2]]  # type: ignore[index]
                elif node.target is aten.unbind.int and _dim(node) == self.dim:
                    self.taken.update({each: self.held[whole][each.args[1]] for each in node.users})  # type: ignore[index]
                else:
                    return False
        return True

    def _ends_in(self, new: fx.Node) -> bool:
        """Whether the new state consists of parts, whether they were put back or joined."""
        if new.target in _JOINED and _dim(new) == self.dim:
            self.held[new] = list(new.args[0])  # type: ignore[arg-type]
        return new in self.held and len(self.held[new]) == len(self.held[self.state])

    def made(self, graph: fx.Graph, new: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """Placeholders of the old parts, and the new parts."""
        placeholders, last = list[fx.Node](), self.state
        for at in range(len(self.held[self.state])):
            with graph.inserting_after(last):
                last = graph.placeholder(f"{self.state.name}_{at}")
            last.meta["val"] = self.state.meta["val"].select(self.dim, at)
            placeholders.append(last)

        def now(part: fx.Node | int) -> fx.Node:
            return placeholders[part] if isinstance(part, int) else now(self.taken[part]) if part in self.taken else part

        after = [now(part) for part in self.held[new]]
        for node, part in self.taken.items():
            node.replace_all_uses_with(now(part))
        return placeholders, [self._alone(graph, part) for part in after] if new.target is aten.cat.default else after

    def _alone(self, graph: fx.Graph, part: fx.Node) -> fx.Node:
        """What was joined with other parts, without the dimension along which it was."""
        with graph.inserting_after(part):
            alone = graph.call_function(aten.squeeze.dim, (part, self.dim))
        alone.meta["val"] = part.meta["val"].squeeze(self.dim)
        return alone


def _dim(node: fx.Node) -> int:
    """The dimension that a node's operation is about, counted from the first."""
    place = 2 if node.target is aten.select_scatter.default else 1
    given: Any = node.args[place] if len(node.args) > place else 0
    tensor: Any = node if node.target in _JOINED else node.args[0]
    return int(given) % int(tensor.meta["val"].dim())
