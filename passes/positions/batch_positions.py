"""The positions of a ragged row as one node of the graph.

With a position_ids input [1, T]: p = position_ids[0].
Without one:                      p = aten.new_empty(input_ids, [T]); batch_positions_with_output(p)
"""

from __future__ import annotations

import torch
from torch import fx

from paged_attn.attn_ops.ops.positions import BATCH_POSITIONS
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import call_of_value, value_of

aten = torch.ops.aten


class BatchPositions:
    """Creates the node [T] int64 on first use; a graph has at most one, stored in `made`."""

    def __init__(self, graph: fx.Graph, form: CallForm) -> None:
        self.graph, self.form = graph, form
        self.made: fx.Node | None = None

    @property
    def node(self) -> fx.Node:
        if self.made is None:
            self.made = self._make()
        return self.made

    def _make(self) -> fx.Node:
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        with self.graph.inserting_before(first):
            if self.form.positions is not None:
                return call_of_value(self.graph, value_of(self.form.positions)[0], aten.select.int, self.form.positions, 0, 0)
            ids = self.form.input_ids
            tokens = call_of_value(self.graph, value_of(ids).shape[1], aten.sym_size.int, ids, 1)
            node = self.graph.call_function(aten.new_empty.default, (ids, [tokens]), {"dtype": torch.int64})
            node.meta["example_value"] = value_of(ids)[0].to(torch.int64)
            self.graph.call_function(BATCH_POSITIONS, (node,))
        return node
