"""A residual addition and an RMS norm go into the product behind them, for steps of one request. The norm is tried on numbers first.

Before: x = residual + y; n = norm(x), in any spelling; paged_attn.linear(n, weight, bias)
After:  product, n, x = paged_attn.add_norm_linear(y, residual, scale, eps, offset, weight, bias, keep)
Left alone: a sum of something that a kernel computes on its way (a scaled or gated y, a norm of y), which would become a launch of its
own; norms that are not x / sqrt(mean(x^2) + eps) * (offset + scale); a product that is in another piece than the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from paged_attn.attn_ops.ops.kinds import SPLITTING
from paged_attn.attn_ops.ops.linears.add_norm import ADD_NORM, ADD_NORM_LINEAR, rms_norm
from paged_attn.attn_ops.ops.linears.linear import LINEAR
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import call_of_value, call_with_value, keep_name, op_name, shape_of, sizes_of, value_of
from paged_attn.passes.fx.memory import behind_views, is_written, remove_dead_code, writes_in_place
from paged_attn.passes.fx.row_layout import MISFITS
from paged_attn.passes.fx.slicing import epsilons_of, evaluate, is_rounded, kind_of, region_behind

# What a norm is made of; an addition of two tensors of its size is where it ends.
_OPERATIONS = set("""
    to float half bfloat16 double type type_as pow square mul mean add rsqrt sqrt reciprocal div truediv rms_norm contiguous detach
""".split())  # fmt: skip
_MOST_NODES = 20


class _Site(NamedTuple):
    """`added`: the sum; `normed`: the norm's result; `nodes`: all that computes it from the sum and `scale`; `shown`: what the product
    takes, and what that is a reshaped view of, back to `normed`."""

    added: fx.Node
    normed: fx.Node
    scale: fx.Node
    linear: fx.Node
    nodes: list[fx.Node]
    shown: list[fx.Node]


def fuse_add_norm(graph: fx.Graph, form: CallForm) -> int:
    """Rewrites in place; returns how many norms became part of a product."""
    count, formulas, results = 0, dict[Hashable, tuple[float, float] | None](), dict[Hashable, tuple[Tensor, ...]]()
    for linear in graph.find_nodes(op="call_function", target=LINEAR):
        site = _site(linear, form)
        if site is None:
            continue
        kind = kind_of(site.nodes)  # layers that are alike are tried once
        if kind not in formulas:
            formulas[kind] = _formula(site)
        if (formula := formulas[kind]) is not None:
            _rewrite(graph, site, *formula, results)
            count += 1
    if count:
        remove_dead_code(graph)
    return count


def separate_norms(graph: fx.Graph) -> None:
    """Undoes `fuse_add_norm` in place, except that sum and norm are one op: the product is a node of its own again."""
    for node in graph.find_nodes(op="call_function", target=ADD_NORM_LINEAR):
        *norm, weight, bias, _ = node.args
        with graph.inserting_before(node):
            both = call_with_value(graph, ADD_NORM, *norm)
            normed, total = (call_with_value(graph, operator.getitem, both, index) for index in (0, 1))
            product = call_with_value(graph, LINEAR, normed, weight, bias)
        for part in list(node.users):
            new = (product, normed, total)[part.args[1]]
            keep_name(new, part)
            part.replace_all_uses_with(new)
            graph.erase_node(part)
        graph.erase_node(node)


def _site(linear: fx.Node, form: CallForm) -> _Site | None:
    given = linear.args[0]
    assert isinstance(given, fx.Node)
    shown = _reshaped(given)
    normed = shown[-1]
    region = region_behind(normed, lambda node: _is_of_norm(node) and not _is_sum(node), _MOST_NODES)
    if region is None:
        return None
    nodes, ends = region
    sums, scales = [node for node in ends if _is_sum(node)], [node for node in ends if form.roles.get(node) == "owned"]
    if len(sums) != 1 or len(scales) != 1 or len(ends) != 2:
        return None
    site = _Site(sums[0], normed, scales[0], linear, nodes, shown)
    sizes, values = sizes_of(site.added), [value_of(each) for each in (site.added, normed, linear)]
    alike = (
        sizes_of(given) in (sizes, sizes[1:])
        and sizes == sizes_of(normed)
        and sizes_of(site.scale) == sizes[-1:]
        and len({value.dtype for value in values}) == 1
    )
    # The op stands where the sum did, and reads the weights there.
    owned = {each for each in (*linear.all_input_nodes, site.scale) if form.roles.get(each) == "owned"}
    return site if alike and _is_in_one_piece(site) and not is_written({site.added, *site.nodes, *owned}, site.added, linear) else None


def _reshaped(node: fx.Node) -> list[fx.Node]:
    """A tensor and, behind it, those that it shows with the same rows in another shape: routers take [1, T, H] as [T, H]."""
    found = [node]
    while op_name(node) in ("reshape", "view", "flatten", "squeeze") and sizes_of(node.args[0])[-1:] == sizes_of(node)[-1:]:
        node = node.args[0]  # type: ignore[assignment]
        found.append(node)
    return found


def _is_of_norm(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and op_name(node) in _OPERATIONS and not writes_in_place(node)


def _is_sum(node: fx.Node) -> bool:
    """Whether it adds two tensors of one size and dtype."""
    if op_name(node) != "add" or writes_in_place(node) or len(node.args) != 2 or node.kwargs:
        return False
    values = [value_of(each) for each in (node, *node.args)]
    if not all(isinstance(value, Tensor) for value in values):
        return False
    return len({value.dtype for value in values}) == 1 and sizes_of(node.args[0]) == sizes_of(node.args[1]) == sizes_of(node)


def _is_in_one_piece(site: _Site) -> bool:
    """Whether no op that splits the graph stands between sum and product, and both terms are in memory before the sum."""
    node = site.added
    while node is not site.linear:
        if node.target in SPLITTING:
            return False
        node = node.next
    return all(_is_stored(each, site.added) for each in site.added.args)


def _is_stored(term: Any, added: fx.Node) -> bool:
    """Whether a tensor is in memory in any case: an input, an op's result, or one of an earlier piece; or the few rows whose logits are
    wanted."""
    base = behind_views(term)
    by_op = isinstance(base.target, OpOverload) and (base.target.namespace == "paged_attn" or base.target is torch.ops.aten.index.Tensor)
    made, value = by_op or base.op == "placeholder", value_of(base)
    if isinstance(value, Tensor) and value.dtype != value_of(term).dtype:
        return False
    node = added
    while not made and node is not base and node.op != "root":
        made, node = node.target in SPLITTING, node.prev
    return made


def _rewrite(graph: fx.Graph, site: _Site, eps: float, offset: float, results: dict[Hashable, tuple[Tensor, ...]]) -> None:
    """`results`: traced ones, which layers share."""
    residual, given = site.added.args
    readers = {user for each in site.shown for user in each.users} - {*site.shown}
    keep = readers != {site.linear}
    _, weight, bias = (*site.linear.args, None)[:3]
    arguments = (given, residual, site.scale, eps, offset, weight, bias, keep)
    kind = (repr([sizes_of(each) for each in (given, site.linear)]), value_of(site.added).dtype, keep)
    with graph.inserting_after(site.added):
        if kind in results:
            fused = call_of_value(graph, results[kind], ADD_NORM_LINEAR, *arguments)
        else:
            fused = call_with_value(graph, ADD_NORM_LINEAR, *arguments)
            results[kind] = value_of(fused)
    for index, old in reversed([*enumerate((site.linear, site.normed, site.added))]):
        with graph.inserting_after(fused):
            part = call_of_value(graph, value_of(fused)[index], operator.getitem, fused, index)
        if sizes_of(part) != sizes_of(old):
            with graph.inserting_after(part):
                part = call_with_value(graph, torch.squeeze, part, 0)
        keep_name(part, old)
        old.replace_all_uses_with(part, delete_user_cb=lambda user: user is not fused)


def _formula(site: _Site) -> tuple[float, float] | None:
    """(eps, offset) with which `rms_norm` gives what the nodes compute, on rows of which some are so small that eps decides."""
    for eps in epsilons_of(site.nodes):
        given = _probe(site, eps)
        x, scale = given[site.added], given[site.scale]
        try:
            got = evaluate(site.nodes, given, site.normed)
        except MISFITS:
            return None
        for offset in (0.0, 1.0):
            if is_rounded(got, rms_norm(x.double(), scale.double(), eps, offset), x.dtype):
                return eps, offset
    return None


def _probe(site: _Site, eps: float) -> dict[fx.Node, Tensor]:
    x, scale, numbers = value_of(site.added), value_of(site.scale), torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.3 * eps**0.5, 3 * eps**0.5, 1.0, 30.0])[:, None]
    rows = (torch.randn(len(sizes), shape_of(site.added)[-1], generator=numbers) + 0.3) * sizes
    rows = rows.view(*(1,) * (x.dim() - 2), *rows.shape)
    factors = torch.rand(scale.shape, generator=numbers) + 0.5
    return {site.added: rows.to(x.device, x.dtype), site.scale: factors.to(scale.device, scale.dtype)}
