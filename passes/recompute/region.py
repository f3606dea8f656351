"""The part of a graph that must be recomputed from all tokens of a request to know an attention's output, and what it is made from.

    x -> linear -> q', k', w' | scores of q' and k' -> topk -> mask -> attention over q, k, v
                     the cut  | recomputed: all that holds tokens against tokens, or mixes tokens otherwise (a running sum)

Values on the left of the cut hold one row per token, are computed as in the graph, and are kept in pages. On the right, masks and all other
values that depend only on positions and the model's own tensors are recreated for the request.

Which values of each token depend on other tokens (a running sum, a convolution, a shift) is found numerically: everything between the
model's products with weights and an attention is evaluated twice on random rows, the second time with one changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import as_traced, depends_on, name_of, op_name, shape_at, token_dims, value_of
from paged_attn.passes.fx.memory import Writers, bases_of, writers_of, written_values
from paged_attn.passes.fx.slicing import ancestors, evaluate_all
from paged_attn.passes.fx.token_data import read_inputs, token_axis, token_data
from paged_attn.passes.prove.score_subgraph import LOOKUPS, placeholder_value, zeros_for

_BY_ROW = LOOKUPS - {"conv1d"}
TOKENS, CHANGED = 9, 4
ROUNDING = 1e-3


class TokenRows:
    """Which values of a graph hold floating-point data of the tokens, one row each, while its attentions are being replaced.

    Create it before the first attention is replaced: all later nodes count as results of attention.
    """

    def __init__(self, graph: fx.Graph, form: CallForm, values: Values) -> None:
        self.graph, self.form, self.values = graph, form, values
        self.known = set(graph.nodes)
        self.data = token_data(graph, form, positions=False)

    def holds_data(self, node: fx.Node) -> bool:
        """Whether it depends on token ids, not only on positions."""
        return node in self.data or node not in self.known

    def is_row(self, node: fx.Node) -> bool:
        """Whether it is a floating-point tensor with one dim of size T and no other that depends on T."""
        return token_axis(node, self.form) is not None and bool(value_of(node).is_floating_point())


@dataclass(frozen=True)
class RecomputeRegion:
    """The nodes that compute `output` from `rows`.

    Attributes:
        nodes: all nodes in graph order, including `rows` and placeholders.
        rows: the cut: floating-point tensors with one token dim and an independent row for each token.
        shapes: other tensors of which only the shape is read.
    """

    output: fx.Node
    nodes: list[fx.Node]
    rows: list[fx.Node]
    shapes: list[fx.Node]


def find_recompute_region(tokens: TokenRows, output: fx.Node, before: fx.Node, where: str) -> RecomputeRegion:
    """The region of an attention's output, all of whose rows are available before the node `before`.

    Raises:
        UnsupportedError: it depends on something that cannot be kept as rows in pages; the message names the layer `where`.
    """
    return _Search(tokens, output, before, where).region()


@dataclass
class _Search:
    tokens: TokenRows
    output: fx.Node
    before: fx.Node
    where: str
    writers: Writers = field(init=False)
    reached: set[fx.Node] = field(init=False, default_factory=set)
    stops: set[fx.Node] = field(init=False, default_factory=set)

    @property
    def num_tokens(self) -> Any:
        return self.tokens.form.num_tokens

    def region(self) -> RecomputeRegion:
        self.writers = writers_of(self.tokens.graph.nodes)
        self._walk()
        square = {node for node in self.reached if self._is_square(node)}
        inside = self._made_from({self.output, *square})
        beside = [node for node in sorted(self.reached - inside) if self.tokens.holds_data(node)]
        with model_code(lambda why: self.refusal(f"what it is made from cannot be evaluated on random values: {why}")):
            mixing = mixing_nodes(beside, self.stops, self.tokens.form, self.tokens.values, self.writers)
        inside = self._made_from({self.output, *square, *mixing})
        rows = sorted({self._narrowest(node, inside) for node in self._cut(inside)})
        nodes = ancestors(self.output, self.output, frozenset(rows), self.writers, through_shapes=False)
        self._check(nodes, rows)
        empty = {node for node in rows if 0 in value_of(node).shape}
        shape_only = {
            source for node in nodes if node not in rows for source in node.all_input_nodes if isinstance(value_of(source), Tensor)
        }
        shapes = sorted(shape_only - set(nodes) | empty)
        return RecomputeRegion(self.output, [n for n in nodes if n not in empty], [n for n in rows if n not in empty], shapes)

    def _walk(self) -> None:
        """Collects everything that the output is made from, back to products of tokens with weights and to earlier attentions."""
        pending = [self.output]
        while pending:
            node = pending.pop()
            if node in self.reached:
                continue
            self.reached.add(node)
            if node is not self.output and self._stops_at(node):
                self.stops.add(node)
            else:
                pending += read_inputs(node) + [writer for writer in self.writers.get(node, ()) if writer < self.output]

    def _stops_at(self, node: fx.Node) -> bool:
        if node not in self.tokens.known:
            return True
        if not self.tokens.is_row(node) or not self.tokens.holds_data(node):
            return False
        if any(getattr(writer.target, "namespace", "") == "paged_attn" for writer in self.writers.get(node, ())):
            return True
        sources = [source for source in read_inputs(node) if isinstance(value_of(source), Tensor)]
        counted = [source for source in sources if token_dims(source, self.num_tokens)]
        return op_name(node) in _BY_ROW and len(counted) == 1 and token_dims(counted[0], self.num_tokens) == 1

    def _is_square(self, node: fx.Node) -> bool:
        """Whether it holds tokens against tokens, made from data of tokens; also if it is one of several results."""
        value = value_of(node)
        values = value if isinstance(value, (tuple, list)) else (value,)
        return self.tokens.holds_data(node) and any(token_dims(one, self.num_tokens) > 1 for one in values)

    def _made_from(self, start: Iterable[fx.Node]) -> set[fx.Node]:
        """`start` and everything in reach that is made from it."""
        inside, before = set(start), -1
        while len(inside) != before:
            before = len(inside)
            for node in sorted(self.reached - self.stops):
                if node not in inside and any(source in inside for source in read_inputs(node)):
                    inside.add(node)
                if node in inside:
                    inside |= written_values(node) & self.reached
        return inside

    def _cut(self, inside: set[fx.Node]) -> set[fx.Node]:
        """The rows from which `inside` is made. Values in between that are not rows (a comparison, several results) are added to it."""
        pending, rows = list(inside), set[fx.Node]()
        while pending:
            for source in read_inputs(pending.pop()):
                if source in inside or source in rows or not self.tokens.holds_data(source):
                    continue
                if self.tokens.is_row(source):
                    rows.add(source)
                    continue
                if source.op == "placeholder" or source in self.stops or self.writers.get(source):
                    raise self._no_row(source)
                inside.add(source)
                pending.append(source)
        return rows

    def _narrowest(self, node: fx.Node, inside: set[fx.Node]) -> fx.Node:
        """The smallest row tensor from which, with positions and weights, `node` can be made: keys before repetition or before a cast."""
        best = node
        while node not in self.stops and not self.writers.get(node):
            sources = [source for source in read_inputs(node) if self.tokens.holds_data(source)]
            if len(sources) != 1 or sources[0] in inside:
                break
            node = sources[0]
            if self.tokens.is_row(node):
                viewed = _bytes_of(node) == _bytes_of(best) and node in bases_of([best])  # kept once for all its views
                best = node if viewed or _bytes_of(node) < _bytes_of(best) else best
        return best

    def _no_row(self, node: fx.Node) -> UnsupportedError:
        value = value_of(node)
        what = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        name = self.tokens.form.roles.get(node) or node.name
        return self.refusal(f"it is also made from {name} ({what}), which has no floating-point row for each token")

    def _check(self, nodes: list[fx.Node], rows: list[fx.Node]) -> None:
        for node in nodes:
            role = self.tokens.form.roles.get(node, "")
            if role not in ("", "owned", "tokens", "position_ids"):
                raise self.refusal(f"it also reads {role.removeprefix('call:')}")
            if role and (written := [w for w in self.writers.get(node, ()) if w in nodes]):
                raise self.refusal(f"{name_of(written[0])} changes {node.name} in place")
        for row in rows:
            if row >= self.before:
                raise self.refusal(f"{row.name} is computed too late")
            first = min(user for user in nodes if row in user.all_input_nodes)
            changed = [writer for base in bases_of([row]) for writer in self.writers.get(base, ()) if first <= writer < self.before]
            if changed:
                raise self.refusal(f"{row.name} is changed in place by {changed[0].name} after it was read")

    def refusal(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.where}: its mask or bias is computed from the tokens' hidden states, and cannot be recomputed from what is kept of "
            f"each token: {why}. Run this model without paged_attn, or report it."
        )


def _bytes_of(node: fx.Node) -> int:
    """The size of a tensor in the traced call; only good for comparing."""
    value = value_of(node)
    return int(value.element_size()) * math.prod(int(as_traced(size)) for size in value.shape)


def mixing_nodes(wanted: list[fx.Node], starts: set[fx.Node], form: CallForm, values: Values, writers: Writers) -> set[fx.Node]:
    """The nodes of `wanted` in which changing one row of `starts` changes other rows. All others keep one independent row per token.

    Args:
        wanted: in graph order; made from `starts`, positions, numbers and the model's own tensors.
    """
    if not wanted:
        return set()
    nodes = ancestors(wanted, wanted[-1], starts, writers, through_shapes=False)
    runs = []
    for changed in (False, True):
        generator = torch.Generator().manual_seed(11)
        runs.append(evaluate_all(nodes, _given(nodes, starts, form, values, generator, changed)))
    return {node for node in wanted if node not in starts and _moves(node, form, runs[0].get(node), runs[1].get(node))}


def _given(
    nodes: list[fx.Node], starts: set[fx.Node], form: CallForm, values: Values, generator: torch.Generator, changed: bool
) -> dict[fx.Node, Any]:
    shape_only = {source for node in nodes if node not in starts for source in node.all_input_nodes}.difference(nodes)
    given: dict[fx.Node, Any] = {node: zeros_for(node, form, TOKENS) for node in shape_only if isinstance(value_of(node), Tensor)}
    for node in nodes:
        if node in starts:
            given[node] = _rows(node, form, generator, changed)
        elif node.op == "placeholder":
            given[node] = _placeholder(form.roles[node], values[node], generator, changed)
    return given


def _rows(node: fx.Node, form: CallForm, generator: torch.Generator, changed: bool) -> Tensor:
    value = value_of(node)
    rows, others = (torch.randn(shape_at(node, form.num_tokens, TOKENS), generator=generator) for _ in range(2))
    for axis, size in enumerate(value.shape):
        if changed and depends_on(size, form.num_tokens):
            rows.select(axis, CHANGED).copy_(others.select(axis, CHANGED))
    return rows.to(value.device, value.dtype)


def _placeholder(role: str, value: Any, generator: torch.Generator, changed: bool) -> Any:
    ids = torch.empty(0)
    if role == "input_ids":
        ids = torch.randint(2, 16, (TOKENS,), generator=generator)
        ids[CHANGED] += int(changed)
    return placeholder_value(role, value, (TOKENS,), ids)


def _moves(node: fx.Node, form: CallForm, one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or one.numel() == 0:
        return False
    if (axis := token_axis(node, form)) is not None:
        rest = torch.tensor([row for row in range(TOKENS) if row != CHANGED], device=one.device)
        one, other = (value.index_select(axis, rest) for value in (one, other))
    one, other = one.double(), other.double()
    limit = ROUNDING * float(one.nan_to_num().abs().max().clamp_min(1e-6))
    return not torch.allclose(one, other, rtol=0, atol=limit, equal_nan=True)
