"""Replaces the operations between a router's logits and its experts by `paged_attn::route`. The rewrite is tried on numbers first.

Before: softmax, topk, gather, sum, div, ... of logits [T, E]
After:  weights, ids = paged_attn.route(logits, bias, ...)
Left alone: routers that read more than logits and a bias, and those whose numbers no `Routing` reproduces.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Container, Iterable, Iterator
from dataclasses import astuple
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.ops.linears.linear import LINEAR
from paged_attn.attn_ops.ops.routing import ROUTE
from paged_attn.attn_ops.specs.routing import Routing, Score
from paged_attn.passes.fx.call_form import Values
from paged_attn.passes.fx.graph_tools import call_with_value, name_of, sizes_of, symbol, value_of
from paged_attn.passes.fx.memory import Writers, behind_views, remove_dead_code, writers_of, written_values
from paged_attn.passes.fx.row_layout import MISFITS
from paged_attn.passes.fx.slicing import evaluate_all, literals_of
from paged_attn.passes.fx.token_data import read_inputs
from paged_attn.passes.recompute.code_numbers import CROWD, LATEST

logger = logging.getLogger("paged_attn")
MOST_NODES = 80  # in a region
ROWS = (23, 8)  # in each probe
SPREADS = (1.0, 8.0, 0.02, 100.0)  # of the probes' logits; the third causes ties in 16 bits, the last meets any limit on them
ROUNDINGS = 4  # allowed error of a weight, in roundings of its dtype
PRODUCTS = (F.linear, LINEAR)


def fuse_routing(graph: fx.Graph, values: Values) -> int:
    """Rewrites in place; returns how many routers became one op."""
    known: list[Routing] = []
    writers, count = writers_of(graph.nodes), 0
    for experts in [node for node in graph.nodes if node.target is EXPERTS]:
        region = region_of(experts, values.keys(), writers)
        routing = None if region is None else proved_routing(region, known)
        if region is None or routing is None:
            continue
        if routing not in known:
            known.append(routing)
            logger.info("routing is one op: %s", routing.describe())
        with graph.inserting_before(region.nodes[0]):
            both = call_with_value(graph, ROUTE, region.logits, region.bias, value_of(region.weights).dtype, *astuple(routing))
            weights = call_with_value(graph, operator.getitem, both, 0)
            ids = call_with_value(graph, operator.getitem, both, 1)
        for old, new in ((region.ids, ids), (region.weights, weights)):
            for reader in region.readers:
                reader.replace_input_with(old, new)
        count += 1
    if count:
        remove_dead_code(graph)
    return count


class RouterRegion(NamedTuple):
    """Nodes in graph order, from logits [T, E] and an optional bias [E] to weights and ids [T, k].

    Attributes:
        of_type: outside tensors of which only the dtype is read.
        sizes: numbers made from the number of rows.
        readers: the nodes that take weights or ids, such as the experts.
    """

    nodes: list[fx.Node]
    logits: fx.Node
    bias: fx.Node | None
    weights: fx.Node
    ids: fx.Node
    of_type: frozenset[fx.Node]
    sizes: frozenset[fx.Node]
    readers: list[fx.Node]


def region_of(experts: fx.Node, inputs: Container[fx.Node], writers: Writers) -> RouterRegion | None:
    """The router of a call of `paged_attn::experts`; None if ids and weights depend on anything but a product [T, E] and a tensor [E]."""
    ids, weights, w1 = (node for node in experts.args[1:4])
    assert isinstance(ids, fx.Node) and isinstance(weights, fx.Node)
    reader, ids = _counted_from_the_first(experts, ids)
    of_inputs = _weights_of_inputs(experts.args[0], ids, weights)
    if of_inputs is not None:
        ids, weights = of_inputs
    found, pending, leaves, of_type, sizes = set[fx.Node](), [ids, weights], set[fx.Node](), set[fx.Node](), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in found or node in leaves or node in sizes:
            continue
        if isinstance(value_of(node), torch.SymInt):
            sizes.add(node)
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
    # In-place writes in the region must stay inside it.
    own = all(written_values(node) <= found for node in found)
    if len(bias) > 1 or len(logits) + len(bias) != len(leaves) or not own:
        return None
    rows = symbol(sizes_of(logits[0])[0])
    if any(getattr(symbol(value_of(node)), "free_symbols", set()) - {rows} for node in sizes):
        return None
    other = frozenset(of_type - found - leaves - sizes)
    # Where the order of a token's experts may show, other nodes keep the model's ids and weights.
    readers = [reader, experts] if of_inputs is None else sorted({*ids.users, *weights.users} - found)
    return RouterRegion(sorted(found), logits[0], bias[0] if bias else None, weights, ids, other, frozenset(sizes), readers)


def _weights_of_inputs(rows: Any, ids: fx.Node, of_outputs: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(ids, weights) [T, k] of experts whose inputs are multiplied by their weights, and their outputs by ones: `dense_experts.py`."""
    product = behind_views(rows)
    if name_of(of_outputs) != "ones_like" or name_of(product) != "mul":
        return None
    weights = behind_views(product.args[1])
    if name_of(weights) != "gather" or behind_views(weights.args[2]) is not behind_views(ids):
        return None
    return weights.args[2], weights


def _counted_from_the_first(experts: fx.Node, ids: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(reader of the ids of all ranks' experts, these ids), where a rank counts from its own first expert: `parallel/own_experts.py`."""
    if name_of(ids) == "remainder" and isinstance(counted := ids.args[0], fx.Node) and name_of(counted) == "sub":
        chosen, first = counted.args
        if isinstance(chosen, fx.Node) and isinstance(first, int):
            return counted, chosen
    return experts, ids


def _is_product(node: Any) -> bool:
    return isinstance(node, fx.Node) and (node.target in PRODUCTS or name_of(node) == "matmul")


def _is_matrix(node: Any) -> bool:
    return len(sizes_of(node)) == 2


def proved_routing(region: RouterRegion, known: Iterable[Routing]) -> Routing | None:
    """The spec that gives the region's ids and weights on every probe; `known`: other layers' specs, tried first."""
    probes = [_probe(region, rows, spread) for rows in ROWS for spread in SPREADS]
    crowd = CROWD + max((int(number) for number in literals_of(region.nodes) if CROWD <= number <= LATEST), default=0)
    logits, bias = probes[0]
    probes.append((logits[:1].repeat(crowd, 1), bias))  # more than any capacity of theirs for the same experts
    try:
        expected = [_evaluated(region, *probe) for probe in probes]
    except MISFITS:
        return None
    for routing in dict.fromkeys((*known, *_candidates(region))):
        if all(_agrees(routing, probe, wanted) for probe, wanted in zip(probes, expected, strict=True)):
            return routing
    return None


def _probe(region: RouterRegion, rows: int, spread: float) -> tuple[Tensor, Tensor | None]:
    """Logits of random rows, a row of -50, which shows what is added to a sum, and a row of zeros; a random bias."""
    fake = value_of(region.logits)
    numbers = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, fake.shape[1], generator=numbers) * spread
    logits[-2:] = torch.tensor([[-50.0], [0.0]])
    if region.bias is None:
        return logits.to(fake.device, fake.dtype), None
    bias = value_of(region.bias)
    return logits.to(fake.device, fake.dtype), torch.rand(bias.shape, generator=numbers).to(bias.device, bias.dtype)


def _evaluated(region: RouterRegion, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    given: dict[fx.Node, Any] = {region.logits: logits}
    rows = symbol(sizes_of(region.logits)[0])
    for node in region.sizes:
        number = symbol(value_of(node))
        given[node] = number if isinstance(number, int) else int(number.subs(rows, len(logits)))
    if region.bias is not None and bias is not None:
        given[region.bias] = bias
    given |= {node: logits.new_empty(0, dtype=value_of(node).dtype) for node in region.of_type}
    values = evaluate_all(region.nodes, given)
    return values[region.weights], values[region.ids]


def _agrees(routing: Routing, probe: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor]) -> bool:
    weights, ids = expected
    if weights.shape != (len(probe[0]), routing.top_k) or ids.shape != weights.shape:
        return False
    try:
        given, chosen = routing(*probe)
    except MISFITS:
        return False
    order, wanted = chosen.argsort(1), ids.argsort(1)  # the order of a token's experts does not matter
    if not torch.equal(chosen.gather(1, order), ids.gather(1, wanted)):
        return False
    limit = ROUNDINGS * torch.finfo(weights.dtype).eps
    return torch.allclose(given.gather(1, order), weights.gather(1, wanted).float(), rtol=limit, atol=limit * 1e-3)


def _candidates(region: RouterRegion) -> Iterator[Routing]:
    """The specs that are possible given the names and literals of the region's operations."""
    names = [name_of(node) for node in region.nodes]
    top_k = int(value_of(region.ids).shape[-1])
    experts = int(value_of(region.logits).shape[1])
    literals = set(literals_of(region.nodes))
    scores: list[tuple[Score, Score]] = [("none", "none")]
    kinds: tuple[Score, ...] = ("softmax", "sigmoid")
    for score in kinds:
        if any(score in name for name in names):
            scores += [(score, "none"), ("none", score)]
    scales = [1.0, *sorted(number for number in literals if number > 0 and number != 1.0)]
    epsilons = [0.0, *sorted(number for number in literals if 0 < number <= 1e-3)]
    renormalised = [(False, 0.0)]
    if not {"sum", "div", "truediv"}.isdisjoint(names):
        renormalised += [(True, eps) for eps in epsilons]
    groups: list[tuple[int, int, int, float]] = [(1, 1, 1, float("-inf"))]
    if names.count("topk") > 1:
        sizes = sorted(int(number) for number in literals if number == int(number) and 1 <= number <= experts)
        for count, taken, best in itertools.product(sizes, sizes, (1, 2)):
            if 1 < count < experts and experts % count == 0 and taken < count + 1 and best <= experts // count:
                groups += [(count, taken, best, hidden) for hidden in (float("-inf"), 0.0)]
    for (count, taken, best, hidden), (score, after), (divided, eps), scale in itertools.product(groups, scores, renormalised, scales):
        rounded = score != "none" and value_of(next(node for node in region.nodes if score in name_of(node))).dtype.itemsize == 2
        yield Routing(top_k, score, after, count, taken, best, hidden, divided, eps, scale, rounded)
