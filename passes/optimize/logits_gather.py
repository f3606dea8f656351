"""Avoids computing unwanted rows: picks the rows whose logits are wanted as far up the graph as can be proved correct.

Before: attention(q, k, v, out); x = x + o_proj(out); x = x + mlp(norm(x)) [1, T, H]; logits = lm_head(norm(x)[:, rows]) [1, N, V]
After:  attention(q, k, v, out); x = x[:, rows] + o_proj(out[rows]); x = x + mlp(norm(x)) [1, N, H]; logits = lm_head(norm(x))

Everything that moves treats rows independently by structure and is read only by the picking (`row_region`). Before anything is changed,
both orders are computed on random numbers and compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor

from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import call, call_of_value, call_with_value, depends_on, shape_at, sizes_of, symbol, value_of
from paged_attn.passes.fx.memory import is_view, remove_dead_code
from paged_attn.passes.fx.row_layout import MISFITS, Rows, plain_rows, times, with_tokens
from paged_attn.passes.fx.slicing import evaluate_all
from paged_attn.passes.fx.token_data import Lookup, lookup_of
from paged_attn.passes.optimize.row_region import RowRegion, find_row_region, is_moving

aten = torch.ops.aten
TOKENS, PICKED = 7, (5, 0, 5, 2)
ROUNDING = 16  # units in the last place of the largest result
_COPYING = {"view": "reshape", aten.view.default: aten.reshape.default}


class GatheredRegion:
    """The region, computed on only the rows `rows` [N] of the frontier.

    Numbers made of T become numbers made of N. A view becomes a reshape, since the picked rows may have another memory layout.
    """

    def __init__(self, form: CallForm, region: RowRegion, rows: fx.Node) -> None:
        self.form, self.region, self.rows = form, region, rows
        self.tokens, self.count = form.num_tokens, value_of(rows).shape[0]
        inputs = {each: None for node in region.layouts for each in node.all_input_nodes if each not in region.layouts}
        self.numbers = [each for each in inputs if not isinstance(value_of(each), Tensor) and self._counts(value_of(each))]
        self.others = [each for each in inputs if each not in region.frontier and each not in self.numbers]
        self._traced: dict[fx.Node, Any] = {}

    def fits(self) -> bool:
        """Whether all shapes follow with N in place of T, and all other properties stay the same."""
        known = {each: value_of(each) for each in self.others}
        try:
            with _traced_like(value_of(self.rows)):
                known |= {each: self._number(each, self.count, lambda node, args: call(node, args, {})) for each in self.numbers}
                for each, layout in self.region.frontier.items():
                    known[each] = aten.index.Tensor(value_of(each), [*[None] * layout.axis, value_of(self.rows)])
                self._traced = {**{each: known[each] for each in self.region.frontier}, **self.evaluate(known)}
        except MISFITS:
            return False
        return all(self._follows(value_of(node), self._traced[node]) for node in self.region.layouts)

    def evaluate(self, known: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        """The values of the region's nodes, given everything that they read from outside."""
        values = dict(known)
        for node in self.region.layouts:
            args, kwargs = fx.map_arg(node.args, values.__getitem__), fx.map_arg(node.kwargs, values.__getitem__)
            values[node] = call(node, args, kwargs, self._target(node))
        return {node: values[node] for node in self.region.layouts}

    def apply(self) -> None:
        """Rewrites the graph; readers of the region's results then get rows [N]."""
        graph, first = self.rows.graph, next(iter(self.region.layouts))
        new: dict[fx.Node, Any] = {}
        with graph.inserting_before(first):
            leaf = self._count_node(graph)
            for each in self.numbers:
                new[each] = self._number(each, leaf, lambda number, args: call_with_value(graph, number.target, *args))
        for each, layout in self.region.frontier.items():
            with graph.inserting_before(min(self.region.users_of(each))):
                new[each] = call_of_value(graph, self._traced[each], aten.index.Tensor, each, [*[None] * layout.axis, self.rows])
        for node in self.region.layouts:
            node.args = fx.map_arg(node.args, lambda each: new.get(each, each))
            node.kwargs = fx.map_arg(node.kwargs, lambda each: new.get(each, each))
            node.target = self._target(node)
            node.meta.pop("val", None)
            node.meta["example_value"] = self._traced[node]

    def _counts(self, value: Any) -> bool:
        """Whether a number, or one of several, depends on T."""
        if isinstance(value, (tuple, list)):
            return any(self._counts(each) for each in value)
        return isinstance(value, SymInt) and depends_on(value, self.tokens)

    def _number(self, node: fx.Node, leaf: Any, make: Callable[[fx.Node, Any], Any]) -> Any:
        """A number of the graph with `leaf` for T. Raises ValueError for more than arithmetic on T, or a multiple read off a tensor."""
        if self.form.roles.get(node) == "tokens":
            return leaf
        if not self._counts(value_of(node)):
            return node if isinstance(leaf, fx.Node) else value_of(node)
        if any(isinstance(value_of(each), Tensor) for each in node.all_input_nodes):
            return self._as_counted(value_of(node), leaf)
        if node.op != "call_function" or node.kwargs:
            raise ValueError(f"{node.name} is more than arithmetic")
        return make(node, fx.map_arg(node.args, lambda each: self._number(each, leaf, make)))

    def _as_counted(self, value: Any, leaf: Any) -> Any:
        """A size, or sizes, with `leaf` for T. Raises ValueError for a multiple of T."""
        if isinstance(value, (tuple, list)):
            return tuple(self._as_counted(each, leaf) for each in value)
        if self._counts(value) and times(value, self.tokens) != 1:
            raise ValueError(f"a size of {value}")
        return leaf if self._counts(value) else value

    def _count_node(self, graph: fx.Graph) -> Any:
        """N in the graph: a separate input, as Dynamo makes it, or a constant."""
        if not isinstance(self.count, SymInt):
            return self.count
        found = [node for node, role in self.form.roles.items() if role == "num_logits" and symbol(value_of(node)) == symbol(self.count)]
        return found[0] if found else call_of_value(graph, self.count, aten.sym_size.int, self.rows, 0)

    def _target(self, node: fx.Node) -> Any:
        return node.target if self.region.writes else _COPYING.get(node.target, node.target)

    def _follows(self, old: Any, new: Any) -> bool:
        if isinstance(old, (tuple, list)):
            return isinstance(new, (tuple, list)) and len(old) == len(new) and all(map(self._follows, old, new))
        if isinstance(old, Tensor):
            return isinstance(new, Tensor) and old.dtype == new.dtype and self._follows(tuple(old.shape), tuple(new.shape))
        if not isinstance(old, (int, SymInt)):
            return old is None and new is None
        wanted = symbol(old).subs(self.tokens, symbol(self.count)) if depends_on(old, self.tokens) else symbol(old)
        return bool(wanted == symbol(new))


@contextmanager
def _traced_like(value: FakeTensor) -> Iterator[None]:
    """Inside, operations run as in tracing but without guards: a size that needed one becomes a number, and `fits` then fails."""
    shapes = value.fake_mode.shape_env
    # Composite operations on symbolic sizes need the Python dispatcher (torch 2.11).
    with value.fake_mode, shapes.suppress_guards() if shapes else nullcontext(), enable_python_dispatcher(), torch.no_grad():
        yield


def _dims_in_memory(value: Tensor) -> list[int]:
    """Dims by decreasing stride; in their order if strides are symbolic."""
    strides = [symbol(stride) for stride in value.stride()]
    numbers = all(isinstance(stride, int) for stride in strides)
    return sorted(range(value.dim()), key=lambda dim: -strides[dim]) if numbers else list(range(value.dim()))


def agrees(fewer: GatheredRegion, results: Mapping[fx.Node, int], values: Values) -> bool:
    """Whether the PICKED of TOKENS random rows have the same results if they are picked before the region as after it.

    Args:
        results: the nodes read from the region, with the axis of their rows.
    """
    generators = dict[torch.device, torch.Generator]()

    def random(node: fx.Node) -> Tensor:
        value = value_of(node)
        order = _dims_in_memory(value)  # kernels are compiled for the weights' memory layout
        shape, device = [shape_at(value, fewer.tokens, TOKENS)[dim] for dim in order], value.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(5)
        where: dict[str, Any] = {"generator": generators[device], "device": device}  # on a CPU core one layer's experts would take 5 s
        if value.dtype.is_floating_point or value.dtype.is_complex:
            drawn = torch.randn(shape, dtype=value.dtype if value.dtype.itemsize > 1 else None, **where)
        else:
            drawn = torch.randint(0, 2, shape, **where)
        return drawn.to(value.dtype).permute([order.index(dim) for dim in range(len(order))])

    # A cached graph is looked up by the contents of `values` that were read; here they are only examples, so this read is not recorded.
    examples = {each: dict.__getitem__(values, each) for each in values}
    others = {each: _example(each, examples, random) for each in fewer.others}
    rows = {each: random(each) for each in fewer.region.frontier}
    picked = torch.tensor(PICKED, device=value_of(fewer.rows).device)
    try:
        with torch.no_grad():
            after = fewer.evaluate({**others, **rows, **_counted(fewer, TOKENS)})
            some = {each: rows[each].index_select(layout.axis, picked) for each, layout in fewer.region.frontier.items()}
            before = fewer.evaluate({**others, **some, **_counted(fewer, len(PICKED))})
            return all(_close(after[node].index_select(axis, picked), before[node], fewer) for node, axis in results.items())
    except MISFITS:
        return False


def _example(node: fx.Node, examples: Mapping[fx.Node, Any], random: Callable[[fx.Node], Tensor]) -> Any:
    """The value of a node outside the region: an example or a view of one, which takes no memory where a layer's experts have gigabytes."""
    views: list[fx.Node] = []
    source = node
    while source not in examples and is_view(source) and len(source.all_input_nodes) == 1:
        views.insert(0, source)
        (source,) = source.all_input_nodes
    if source in examples and not _is_merged(source, examples[source]):
        return evaluate_all(views, {source: examples[source]})[node]
    return random(node) if isinstance(value_of(node), Tensor) else value_of(node)


def _is_merged(source: fx.Node, example: Any) -> bool:
    """Whether the graph's input stands for more than its tensor: for the experts' weights that will lie in one with it."""
    sizes = sizes_of(source)
    return isinstance(example, Tensor) and all(isinstance(size, int) for size in sizes) and sizes != tuple(example.shape)


def _counted(fewer: GatheredRegion, length: int) -> dict[fx.Node, Any]:
    return {each: with_tokens(value_of(each), fewer.tokens, length) for each in fewer.numbers}


def _close(one: Tensor, other: Tensor, fewer: GatheredRegion) -> bool:
    """Equal within the rounding of the region's coarsest dtype."""
    if not one.is_floating_point() or one.shape != other.shape:
        return torch.equal(one, other)
    floats = [v.dtype for n in fewer.region.layouts if isinstance(v := value_of(n), Tensor) and v.is_floating_point()]
    limit = ROUNDING * max(torch.finfo(dtype).eps for dtype in floats) * one.abs().max()
    return bool(((one - other).abs() <= limit).all())  # False for NaN


logger = logging.getLogger("paged_attn")


def gather_logits_early(graph: fx.Graph, form: CallForm, values: Values) -> int:
    """Rewrites in place; returns how many nodes now compute fewer rows. The result does not depend on the contents of `values`."""
    if isinstance(form.num_tokens, int):
        return 0
    pickings = [picking for node in graph.nodes if (picking := _picking_of(node, form)) is not None]
    moved = 0
    for rows in dict.fromkeys(picking.at for picking in pickings):
        moved += _move(graph, form, values, [picking for picking in pickings if picking.at is rows])
    if moved:
        remove_dead_code(graph)
    return moved


def _picking_of(node: fx.Node, form: CallForm) -> Lookup | None:
    """A lookup of token rows by an input of the graph [N], such as x[:, rows]; None for any other node."""
    found = lookup_of(node)
    index = None if found is None or found.at.op != "placeholder" else value_of(found.at)
    if found is None or not isinstance(index, FakeTensor) or index.dim() != 1 or depends_on(index.shape[0], form.num_tokens):
        return None
    return found if plain_rows(value_of(found.rows), form.num_tokens) == Rows(found.axis) else None


def _move(graph: fx.Graph, form: CallForm, values: Values, pickings: list[Lookup]) -> int:
    region = find_row_region(graph, {picking.node for picking in pickings}, form.num_tokens)
    moving = [each for each in pickings if region.layouts.get(each.rows) == Rows(each.axis)]
    if len(moving) < len(pickings):
        return _move(graph, form, values, moving) if moving else 0
    if not any(not is_moving(node) for node in region.layouts):
        return 0
    fewer = GatheredRegion(form, region, pickings[0].at)
    sources = {picking.rows: picking.axis for picking in pickings}
    if not fewer.fits() or not agrees(fewer, sources, values):
        logger.info("rows are picked where the model picks them: picked earlier, the same operations gave a different result")
        return 0
    fewer.apply()
    for picking in pickings:
        picking.node.replace_all_uses_with(picking.rows)
        graph.erase_node(picking.node)
    return len(region.layouts)
