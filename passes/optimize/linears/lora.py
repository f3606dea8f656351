"""Makes the variant of a rewritten graph for steps with adapters: its linear layers are followed by `paged_attn::lora`.

Before: F.linear(x, weight, bias), or paged_attn.linear or .add_norm_linear, or torch.addmm(bias, x, weight); of one linear layer or of
        several merged ones
After:  paged_attn.lora(that, x, a, b, scales, slots, rows), whose a, b, scales and slots are new inputs of the graph; or, where a may be
        further rows of the weight, the product with all of them and paged_attn.lora_up(that, b, scales, slots, rows)
Left alone: weights that several linear layers share, and rows that are neither the step's tokens nor those whose logits are wanted. An
adapter for such a layer is refused when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.ops.linears.linear import LINEAR
from paged_attn.attn_ops.ops.linears.lora import LORA, LORA_UP
from paged_attn.attn_ops.specs.lora import LoraPart, LoraSite
from paged_attn.passes.fx.graph_tools import LINEARS, arguments_of, call_of_value, shape_of, symbol, value_of
from paged_attn.passes.optimize.linears.add_norm import separate_norms
from paged_attn.passes.optimize.linears.merge import Merge
from paged_attn.passes.optimize.linears.mergeable_weights import ALIGNMENT

_LINEARS = (*LINEARS, LINEAR)
_PRODUCTS = (torch.addmm, torch.ops.aten.addmm.default)
MOST_SPARE = 8  # weight rows per row of a: each step reads all of a, where two kernels read only adapters in use
_OPERANDS = {**dict.fromkeys(_LINEARS, ("input", "weight", "bias")), **dict.fromkeys(_PRODUCTS, ("input", "mat1", "mat2"))}


def insert_lora(
    graph: fx.Graph, roles: Sequence[str], merges: Sequence[Merge], modules: Mapping[int, str], slots: int, rank: int,
    may_move: Callable[[int], bool] = lambda index: False,
) -> tuple[tuple[LoraSite, ...], tuple[Merge, ...]]:  # fmt: skip
    """Rewrites in place every product with the weight of a linear layer of the model.

    Args:
        graph: a rewritten graph, after linears were merged; with example values.
        roles: of its placeholders, in order.
        modules: index of a placeholder -> the linear layer whose weight it was before linears were merged, if only one.
        slots, rank: room for this many adapters, of at most this rank.
        may_move: whether the parameter that was traced as this input may become a view of another tensor.

    Returns:
        The sites, and the weights and biases that must have spare rows, as merges of one or several. The graph has more inputs at its end:
        slots [T] and [N] int32 of the rows and of the rows of logits, then each site's a (unless the weight has room for it), b and scales.
    """
    separate_norms(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    rooms = _rooms(placeholders, merges)
    owned = {placeholder: _parts(rooms.get(placeholder), modules) for placeholder in placeholders}
    by_role = dict(zip(roles, placeholders, strict=True))
    tokens = symbol(shape_of(by_role["input_ids"])[-1])
    wanted = by_role.get("logits_rows")
    logits = None if wanted is None else symbol(shape_of(wanted)[0])
    found = [product for node in graph.nodes if (product := _product(node, owned, tokens, logits)) is not None]
    if not found:
        return (), ()
    sites, widened, complete = list[LoraSite](), list[Merge](), dict[fx.Node, fx.Node]()
    inputs = _Inputs(placeholders[-1], value_of(found[0].given))
    step_slots = inputs.add("lora_slots", (shape_of(by_role["input_ids"])[-1],), torch.int32)
    logits_slots = inputs.add("lora_logits_slots", (shape_of(wanted)[0],) if wanted is not None else (2,), torch.int32)
    for index, product in enumerate(found):
        site, node, value = product.site, product.node, value_of(product.node)
        spare = slots * len(site.parts) * rank  # rows of `a`
        own = [rooms[each] for each in product.weights]
        if _has_room(product, spare) and all(may_move(each) for room in own for each in room.inputs):
            widened += [room._replace(spare=spare) for room in own]
            for each in product.weights:
                _lengthen(each, 0, spare)
            _lengthen(node, -1, spare)
            site = replace(site, weight=own[0].inputs[0])
        sites.append(site)
        factors = [
            inputs.add(f"lora_{index}_{name}", shape, torch.float32 if name == "scales" else site.dtype)
            for name, shape in zip(("a", "b", "scales"), site.shapes(slots, rank), strict=True)
            if name != "a" or site.weight is None
        ]
        given = complete.get(product.given, product.given)  # the input may be another linear layer's output, completed by its adapter
        operands = (node, given) if site.weight is None else (node,)
        with graph.inserting_after(node):
            arguments = (*operands, *factors, logits_slots if site.of_logits else step_slots, list(site.rows))
            added = call_of_value(graph, value.new_empty(value.shape), LORA if site.weight is None else LORA_UP, *arguments)
        complete[node] = added
        for user in [user for user in node.users if user is not added]:
            user.replace_input_with(node, added)
    graph.lint()
    return tuple(sites), tuple(widened)


class _Product(NamedTuple):
    """`weights`: the weight and bias of a linear layer; empty for other products."""

    node: fx.Node
    given: fx.Node
    site: LoraSite
    weights: tuple[fx.Node, ...]


class _Inputs:
    """New placeholders of a graph after `last`, with example values like `source`'s."""

    def __init__(self, last: fx.Node, source: Tensor) -> None:
        self._last, self._source = last, source

    def add(self, name: str, shape: Sequence[Any], dtype: torch.dtype) -> fx.Node:
        graph = self._last.graph
        with graph.inserting_after(self._last):
            self._last = graph.placeholder(name)
        self._last.meta["example_value"] = self._source.new_empty(shape, dtype=dtype)
        return self._last


def _rooms(placeholders: Sequence[fx.Node], merges: Sequence[Merge]) -> dict[fx.Node, Merge]:
    """For each of the graph's tensors the parameters that share its memory: a merge, or only itself."""
    known, rooms = {merge.inputs[0]: merge for merge in merges}, {}
    for index, placeholder in enumerate(placeholders):
        value = value_of(placeholder)
        if isinstance(value, Tensor) and value.dim() > 0:
            rooms[placeholder] = known.get(index) or Merge((index,), (value.shape[0],))
    return rooms


def _parts(room: Merge | None, modules: Mapping[int, str]) -> list[tuple[str, int | None]]:
    """The linear layers whose weights are in this memory, each with its rows (None: all); empty unless all of them are known."""
    if room is None or not all(each in modules for each in room.inputs):
        return []
    single = len(room.inputs) == 1
    return [(modules[each], None if single else rows) for each, rows in zip(room.inputs, room.rows, strict=True)]


def _lengthen(node: fx.Node, dim: int, more: int) -> None:
    value = value_of(node)
    shape = list(value.shape)
    shape[dim] += more
    node.meta["example_value"] = value.new_empty(shape)


def _has_room(product: _Product, spare: int) -> bool:
    """Whether a can be stored as further rows of the weight: this adds little to read, and kernels find it aligned."""
    rows, size = sum(product.site.rows), product.site.dtype.itemsize
    unshared = all(each.op == "placeholder" and len(each.users) == 1 for each in product.weights)
    return bool(product.weights) and unshared and spare * MOST_SPARE <= rows and spare * size % ALIGNMENT == 0


def _product(node: fx.Node, owned: Mapping[fx.Node, list[tuple[str, int | None]]], tokens: Any, logits: Any) -> _Product | None:
    """A product with a linear layer's weight of rows of tokens or of logits; None for any other node."""
    names = _OPERANDS.get(node.target) if node.op == "call_function" else None
    if names is None:
        return None
    operands = arguments_of(node, names)
    is_linear = "weight" in names
    given, weight = (operands["input"], operands["weight"]) if is_linear else (operands["mat1"], operands["mat2"])
    plain = all(operands.get(name, 1) == 1 for name in ("alpha", "beta"))
    if not plain or not isinstance(given, fx.Node) or not isinstance(weight, fx.Node) or not owned.get(weight):
        return None
    of_logits = _rows(given) == logits
    if not of_logits and _rows(given) != tokens:
        return None
    outputs, columns = int(shape_of(node)[-1]), int(shape_of(given)[-1])
    parts = tuple(LoraPart(module, outputs if rows is None else rows) for module, rows in owned[weight])
    weights = tuple(each for each in (weight, operands.get("bias")) if isinstance(each, fx.Node)) if is_linear else ()
    return _Product(node, given, LoraSite(parts, columns, value_of(node).dtype, of_logits), weights)


def _rows(node: fx.Node) -> Any:
    """The number of rows of a tensor [1, T, n] or [T, n]; None for other shapes."""
    *leading, last = (symbol(size) for size in shape_of(node))
    sizes = [size for size in leading if size != 1]
    return sizes[0] if len(sizes) == 1 and isinstance(last, int) else None
