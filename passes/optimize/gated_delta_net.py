"""The gates before a gated delta rule, and the gated norm of its result, become part of its op: one kernel for decoding rows.

Before: projection -> slices -> g = -exp(A) softplus(a + d), beta = sigmoid(b) -> gated_delta_rule -> norm(x) * silu(z) -> linear
After:  projection -> gated_delta_net, with the columns of a, b and z in numbers -> linear
Tried, not matched: gates and norm, in any spelling, are evaluated on numbers beside `attn_ops/scans/gated_delta_net.py`.
Left alone: gates and norms of another form, and operands that are no evenly spaced columns of a tensor.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.ops.scans import GATED_DELTA_NET, GATED_DELTA_RULE
from paged_attn.attn_ops.scans.gated_delta_net import GATES, decays, gated_norm
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import (
    MOVES,
    call_of_value,
    call_with_value,
    keep_name,
    name_of,
    op_name,
    reached,
    shape_at,
    shape_of,
    sizes_of,
    value_of,
)
from paged_attn.passes.fx.memory import is_written, remove_dead_code, writes_in_place
from paged_attn.passes.fx.row_layout import MISFITS
from paged_attn.passes.fx.slicing import epsilons_of, evaluate, is_rounded, kind_of, region_behind
from paged_attn.passes.optimize.scan_operands import columns_of, has_tensors, moved_from
from paged_attn.passes.replace.kv_heads import PROBE_TOKENS, concrete

_ARITHMETIC = set("""
    to float half bfloat16 double type type_as add mul neg exp softplus sigmoid silu pow square mean rsqrt sqrt reciprocal div truediv
    rms_norm
""".split())  # fmt: skip
_MOST_NODES = 40


class _Region(NamedTuple):
    """What computes `result` from `leaf`, a part of a tensor of rows, from parameters, and from `received`, if there is one."""

    result: fx.Node
    nodes: list[fx.Node]
    leaf: fx.Node
    owned: list[fx.Node]
    received: fx.Node | None

    def run(self, form: CallForm, values: dict[fx.Node, Tensor]) -> Tensor | None:
        """The result on these values, in float64; None if the nodes do not run on a few rows."""
        given: dict[fx.Node, Any] = {node: value.to(value_of(node).device, value_of(node).dtype) for node, value in values.items()}
        for other in {other for node in self.nodes for other in node.all_input_nodes} - {*given, *self.nodes}:
            given[other] = concrete(value_of(other), form)
        try:
            result: Tensor = evaluate(self.nodes, given, self.result)
        except MISFITS:
            return None
        return result.double().cpu()


class _Site(NamedTuple):
    decay: _Region
    learned: _Region
    norm: _Region


class _Formula(NamedTuple):
    """Which of the decay's parameters is A, and the numbers of `GatedDeltaNet`."""

    a_log: int
    factor: float
    eps: float
    offset: float
    act: str


def fuse_gated_delta_nets(graph: fx.Graph, form: CallForm) -> int:
    """Rewrites in place; returns how many delta rules took in their gates and norm."""
    count, formulas = 0, dict[Hashable, _Formula | None]()
    for node in graph.find_nodes(op="call_function", target=GATED_DELTA_RULE):
        site = _site(node, form)
        if site is None:
            continue
        kind = tuple(kind_of(region.nodes) for region in site)  # layers that are alike are tried once
        if kind not in formulas:
            formulas[kind] = _formula(site, form)
        formula, operands = formulas[kind], [columns_of(region.leaf, form) for region in (site.decay, site.learned, site.norm)]
        if formula is None or None in operands:
            continue
        _rewrite(graph, node, site, formula, operands)
        count += 1
    if count:
        remove_dead_code(graph)
    return count


def _site(node: fx.Node, form: CallForm) -> _Site | None:
    arguments: tuple[Any, ...] = node.args
    query, key, value, g, beta, output, *_ = arguments
    heads, width = (int(size) for size in shape_of(value)[1:])
    sink = _only_result(output, node)
    if sink is None or not _shows(sink, output) or value_of(sink).dtype != value_of(output).dtype:
        return None
    decay, learned, norm = _region(g, form), _region(beta, form), _region(sink, form, output)
    if decay is None or learned is None or norm is None:
        return None
    sizes = [[sizes_of(each) for each in region.owned] for region in (decay, learned, norm)]
    if sizes != [[(heads,), (heads,)], [], [(width,)]]:
        return None
    # The op moves to where the norm's result was, and reads its operands there.
    inside, read = {*decay.nodes, *learned.nodes}, set[fx.Node]()
    for region in (decay, learned, norm):
        read |= {region.leaf, *region.owned}
    written = is_written(read | inside, min(inside), sink) or is_written({query, key, value, *norm.nodes}, node.next, sink)
    return None if written else _Site(decay, learned, norm)


def _only_result(output: fx.Node, rule: fx.Node) -> fx.Node | None:
    """The last of the values that arithmetic makes of the rule's output, if nothing else leaves it."""

    def readers(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if user is not rule and isinstance(value_of(user), Tensor)]  # others read a shape

    leaving = list[fx.Node]()
    for count, node in enumerate(reached([output], lambda node: filter(_computes, readers(node)))):
        if count == _MOST_NODES:
            return None
        if not all(map(_computes, readers(node))):
            leaving.append(node)
    return leaving[0] if len(leaving) == 1 else None


def _computes(node: fx.Node) -> bool:
    return (name_of(node) in MOVES or op_name(node) in _ARITHMETIC) and not writes_in_place(node)


def _region(result: fx.Node, form: CallForm, received: fx.Node | None = None) -> _Region | None:
    def inside(node: fx.Node) -> bool:
        return node is not received and has_tensors(value_of(node)) and not _is_part(node, received) and _computes(node)

    region = region_behind(result, inside, _MOST_NODES)
    if region is None:
        return None
    nodes, ends = region
    owned = {node for node in ends if form.roles.get(node) == "owned"}
    leaves = [node for node in ends - owned if node is not received and has_tensors(value_of(node))]
    inputs = dict.fromkeys(each for node in nodes for each in node.all_input_nodes)  # in an order that layers share
    if len(leaves) != 1 or not _is_part(leaves[0], received) or (received is not None and received not in inputs):
        return None
    return _Region(result, nodes, leaves[0], [each for each in inputs if each in owned], received)


def _is_part(node: fx.Node, received: fx.Node | None) -> bool:
    """Whether a value is a part of one tensor that arithmetic did not make."""
    base = moved_from(node)[0]
    return base is not received and base.op == "call_function" and op_name(base) not in _ARITHMETIC


def _shows(sink: fx.Node, output: fx.Node) -> bool:
    """Whether the shape of `sink` is that of `output` [T, H, V], with heads side by side or not, maybe as one row of tokens."""
    tokens, heads, width = sizes_of(output)
    return sizes_of(sink) in [(*row, tokens, *sizes) for row in ((), (1,)) for sizes in ((heads, width), (heads * width,))]


def _rewrite(graph: fx.Graph, node: fx.Node, site: _Site, formula: _Formula, operands: list[Any]) -> None:
    arguments: tuple[Any, ...] = node.args
    query, key, value, _, _, output, normalise, *state = arguments
    a_log, dt_bias = site.decay.owned[formula.a_log], site.decay.owned[1 - formula.a_log]
    sink, numbers = site.norm.result, (formula.factor, formula.eps, formula.offset, formula.act)
    with graph.inserting_before(sink):
        given: list[Any] = []
        for base, columns in operands:
            given += [base if value_of(base).dim() == 2 else call_with_value(graph, torch.select, base, 0, 0), columns]
        received = call_of_value(graph, value_of(output), output.target, *output.args, **output.kwargs)
        fused = graph.call_function(
            GATED_DELTA_NET, (query, key, value, *given, a_log, dt_bias, *site.norm.owned, received, normalise, *numbers, *state)
        )
        fused.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        shown = received if sizes_of(sink)[-2:] == sizes_of(output)[-2:] else call_with_value(graph, torch.flatten, received, 1)
        shown = shown if len(sizes_of(shown)) == len(sizes_of(sink)) else call_with_value(graph, torch.unsqueeze, shown, 0)
    keep_name(shown, sink)
    sink.replace_all_uses_with(shown)
    graph.erase_node(node)


def _formula(site: _Site, form: CallForm) -> _Formula | None:
    numbers = torch.Generator().manual_seed(0)

    def drawn(node: fx.Node, scale: float = 1.0) -> Tensor:
        return torch.randn(shape_at(node, form.num_tokens, PROBE_TOKENS), generator=numbers) * scale

    a, b, z = (drawn(region.leaf, 3.0).to(value_of(region.leaf).dtype) for region in site)
    parameters = [drawn(each).to(value_of(each).dtype) for each in site.decay.owned]
    g = site.decay.run(form, {site.decay.leaf: a, **dict(zip(site.decay.owned, parameters, strict=True))})
    first = next((i for i, j in permutations((0, 1)) if _same(g, decays(a.double(), *_wide(parameters[i], parameters[j])), a)), None)
    beta = site.learned.run(form, {site.learned.leaf: b})
    factor = next((each for each in (1.0, 2.0) if _same(beta, each * b.double().sigmoid(), b)), None)
    output, (scale,) = site.norm.received, site.norm.owned
    assert output is not None
    if first is None or factor is None:
        return None
    weights = drawn(scale).abs().to(value_of(scale).dtype)
    for eps in epsilons_of(site.norm.nodes):
        small = torch.tensor([0.3 * eps**0.5, 3 * eps**0.5, 1.0])[:PROBE_TOKENS, None, None]  # eps decides some rows
        x = (drawn(output) * small).to(value_of(output).dtype)
        got = site.norm.run(form, {output: x, site.norm.leaf: z, scale: weights})
        for offset, act in product((0.0, 1.0), GATES):
            expected = gated_norm(x.double(), z.double().reshape(x.shape), weights.double(), eps, offset, act)
            if _same(got, expected, x):
                return _Formula(first, factor, eps, offset, act)
    return None


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.double() for tensor in tensors)


def _same(got: Tensor | None, expected: Tensor, given: Tensor) -> bool:
    return got is not None and got.numel() == expected.numel() and is_rounded(got.reshape(expected.shape), expected, given.dtype)
