"""Rows that a model mixes with those of a few tokens before, outside any attention: convolutions and shifts that no cache keeps.

Before: y = F.conv1d(F.pad(x, (3, 0)), w); k = cat([zeros, x[:, :-1]], 1)
After:  a site of its own for y and for k, like an attention that no spec describes; each runs on the new tokens and those few before them.

A candidate is made of a tensor with a few rows more or less than there are tokens, or shifts its rows itself. It counts if it is proved
that its rows are made of no more than MOST tokens before them (`reach.py`); all others stay as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.find.attention_site import AttentionSite, NearbyRows, module_path
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import call_with_value, depends_on, op_name, shape_of, symbol, token_dims, value_of
from paged_attn.passes.fx.memory import bases_of, writers_of
from paged_attn.passes.fx.model_facts import max_positions, model_dtype
from paged_attn.passes.fx.token_data import read_inputs, token_axis
from paged_attn.passes.recompute.other_weights import reach_of_program
from paged_attn.passes.recompute.program import make_program, owned_tensors, prove_causal, row_input
from paged_attn.passes.recompute.reach import MOST
from paged_attn.passes.recompute.region import TokenRows, find_recompute_region

_SHIFTS = {"pad", "constant_pad_nd", "roll", "conv1d", "conv2d"}
aten = torch.ops.aten


def find_nearby_rows(graph: fx.Graph, form: CallForm, values: Values, model: nn.Module | None) -> list[AttentionSite]:
    """Makes a site of every value of the graph that is proved to be such, in graph order; the graph computes the same as before.

    A site's node is [1, heads, T, dim]; its query, key and value are all the first of the tensors that it is made of.
    """
    search = _Search(graph, form, values, model)
    return [site for node in list(graph.nodes) if search.is_candidate(node) and (site := search.site(node)) is not None]


class _Search:
    def __init__(self, graph: fx.Graph, form: CallForm, values: Values, model: nn.Module | None) -> None:
        self.graph, self.form, self.values, self.model = graph, form, values, model
        self.tokens, self.writers = TokenRows(graph, form, values), writers_of(graph.nodes)
        self.reaches: dict[str, int | None] = {}

    def is_candidate(self, node: fx.Node) -> bool:
        if not self.tokens.is_row(node) or not self.tokens.holds_data(node) or any(self.writers.get(base) for base in bases_of([node])):
            return False
        return op_name(node) in _SHIFTS or any(self._is_longer(source) for source in read_inputs(node))

    def _is_longer(self, node: fx.Node) -> bool:
        """Whether it has a few rows more or less than there are tokens."""
        value = value_of(node)
        if not isinstance(value, Tensor) or token_dims(node, self.form.num_tokens) != 1 or not self.tokens.holds_data(node):
            return False
        more = [symbol(size) - self.form.num_tokens for size in value.shape if depends_on(size, self.form.num_tokens)]
        return bool(more[0].is_Integer and more[0] != 0 and abs(more[0]) <= MOST)

    def site(self, node: fx.Node) -> AttentionSite | None:
        made, order = self._as_heads(node)
        rows = self._proved(made, f"layer at {module_path(node) or node.name}")
        if rows is None:
            for each in reversed(made):
                self.graph.erase_node(each)
            return None
        self._use(node, made, order)
        return AttentionSite(made[-1], rows[0], rows[0], rows[0], NearbyRows(), "rows of nearby tokens", node.name, order)

    def _as_heads(self, node: fx.Node) -> tuple[list[fx.Node], tuple[int, ...]]:
        """Nodes behind it whose last one is [1, heads, T, dim], and the permutation of its dims to [lead.., T, dim]."""
        axis, dims = token_axis(node, self.form), value_of(node).dim()
        others = [dim for dim in range(dims) if dim != axis]
        assert axis is not None
        order = (*others[:-1], axis, *others[-1:])
        with self.graph.inserting_after(node):
            moved = call_with_value(self.graph, aten.permute.default, node, order)
        *lead, _, width = shape_of(moved)
        with self.graph.inserting_after(moved):
            heads = call_with_value(self.graph, aten.reshape.default, moved, [1, math.prod(map(int, lead)), -1, int(width)])
        return [moved, heads], order

    def _use(self, node: fx.Node, made: list[fx.Node], order: tuple[int, ...]) -> None:
        """Puts the site's rows, in the node's own layout, in its place."""
        *lead, _, width = shape_of(made[0])
        back = sorted(range(len(order)), key=order.__getitem__)
        with self.graph.inserting_after(made[-1]):
            rows = call_with_value(self.graph, aten.reshape.default, made[-1], [*map(int, lead), -1, int(width)])
        with self.graph.inserting_after(rows):
            moved = call_with_value(self.graph, aten.permute.default, rows, back)
        with self.graph.inserting_after(moved):
            result = call_with_value(self.graph, "contiguous", moved)
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not made[0])
        self.tokens.known.difference_update(made)

    def _proved(self, made: list[fx.Node], where: str) -> list[fx.Node] | None:
        """The tensors that rows are made of; None if these are rows of their own, or of more tokens than a few before."""
        output = made[-1]
        self.tokens.known.update(made)
        self.tokens.data.update(made)
        device = value_of(output).device
        try:
            region = find_recompute_region(self.tokens, output, output, where)
            program = make_program(region, self.form, self.values, (0, 1, 2, 3), where)
            if program.computes not in self.reaches:
                dtype = value_of(output).dtype if self.model is None else model_dtype(self.model)
                rows = [row_input(node, self.form, dtype) for node in region.rows]
                owned = owned_tensors(program, self.values)
                total = prove_causal(program, rows, owned, self.form, device, where, max_positions(self.model))
                self.reaches[program.computes] = reach_of_program(program, rows, owned, total, self.form.min_tokens, device)
        except UnsupportedError:
            return None
        return region.rows if self.reaches[program.computes] else None
