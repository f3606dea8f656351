"""The operations between a router's logits and what its experts are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import fx

from paged_attn.attn_ops.ops.linears.linear import LINEAR
from paged_attn.passes.fx.graph_tools import behind_views, name_of, sizes_of, value_of, writers_of, written_values
from paged_attn.passes.fx.token_data import read_inputs

MOST_NODES = 80  # of a region
_PRODUCTS = (F.linear, LINEAR)


class Region(NamedTuple):
    """Nodes in graph order, from logits [T, E] and maybe a bias [E] to weights and ids [T, k]; `of_type`: tensors outside of which only the
    type is read; `reader`: what is given the ids, the experts or what makes ids of a rank's own experts of them."""

    nodes: list[fx.Node]
    logits: fx.Node
    bias: fx.Node | None
    weights: fx.Node
    ids: fx.Node
    of_type: frozenset[fx.Node]
    reader: fx.Node


def region_of(experts: fx.Node, inputs: Mapping[fx.Node, Any]) -> Region | None:
    """Of one call of `paged_attn::experts`; None if its ids and weights are made from anything but a product [T, E] and a tensor [E].

    `inputs`: the graph's inputs, with the real tensors behind them.
    """
    ids, weights, w1 = (node for node in experts.args[1:4])
    assert isinstance(ids, fx.Node) and isinstance(weights, fx.Node)
    reader, ids = _counted_from_the_first(experts, ids)
    writers = writers_of(experts.graph.nodes)
    found, pending, leaves, of_type = set[fx.Node](), [ids, weights], set[fx.Node](), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in found or node in leaves:
            continue
        if node in inputs or _is_product(node) or (_is_matrix(node) and not _is_matrix(node.args[0]) and _is_product(behind_views(node))):
            leaves.add(node)
            continue
        found.add(node)
        read = read_inputs(node)
        of_type |= set(node.all_input_nodes) - set(read)
        pending += [*read, *writers.get(node, ())]
        if len(found) > MOST_NODES or not node.all_input_nodes:
            return None
    logits = [leaf for leaf in leaves if len(sizes_of(leaf)) == 2]
    if len(logits) != 1 or (reader is experts and sizes_of(logits[0])[1] != value_of(w1).shape[0]):
        return None
    bias = [leaf for leaf in leaves if sizes_of(leaf) == sizes_of(logits[0])[1:]]
    # What is written in place in the region must live there.
    own = all(written_values(node) <= found for node in found)
    if len(bias) > 1 or len(logits) + len(bias) != len(leaves) or not own:
        return None
    return Region(sorted(found), logits[0], bias[0] if bias else None, weights, ids, frozenset(of_type - found - leaves), reader)


def _counted_from_the_first(experts: fx.Node, ids: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(what reads the ids of all ranks' experts, these ids), where a rank counts from its own: `parallel/own_experts.py`."""
    if name_of(ids) == "remainder" and isinstance(counted := ids.args[0], fx.Node) and name_of(counted) == "sub":
        chosen, first = counted.args
        if isinstance(chosen, fx.Node) and isinstance(first, int):
            return counted, chosen
    return experts, ids


def _is_product(node: Any) -> bool:
    return isinstance(node, fx.Node) and (node.target in _PRODUCTS or name_of(node) == "matmul")


def _is_matrix(node: Any) -> bool:
    return len(sizes_of(node)) == 2
