"""Linear layers followed by `paged_attn::lora`: the variant of a rewritten graph for steps with adapters.

Before: F.linear(x, weight, bias), or paged_attn.linear, or torch.addmm(bias, x, weight); of one linear layer or of several merged ones
After:  paged_attn.lora(that, x, a, b, scales, slots, rows), whose a, b, scales and slots are new inputs of the graph
Left alone: weights that several linear layers share, and rows that are neither the step's tokens nor those whose logits are wanted. An
adapter for such a layer is refused when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paged_attn.attn_ops.ops.linears.linear import LINEAR
from paged_attn.attn_ops.ops.linears.lora import LORA
from paged_attn.attn_ops.specs.lora import LoraPart, LoraSite
from paged_attn.passes.fx.graph_tools import shape_of, symbol, value_of
from paged_attn.passes.optimize.linears.merge import Merge

_LINEARS = (F.linear, torch.ops.aten.linear.default, LINEAR)
_PRODUCTS = (torch.addmm, torch.ops.aten.addmm.default)
_OPERANDS = {**dict.fromkeys(_LINEARS, ("input", "weight", "bias")), **dict.fromkeys(_PRODUCTS, ("input", "mat1", "mat2"))}


def insert_lora(
    graph: fx.Graph, roles: Sequence[str], merges: Sequence[Merge], modules: Mapping[int, str], slots: int, rank: int
) -> tuple[LoraSite, ...]:
    """Rewrite in place, where there is a linear layer of the model.

    Args:
        graph: rewritten, with merged linears and all; with example values.
        roles: of its placeholders, in order.
        modules: index of a placeholder -> the one linear layer whose weight it was before linears were merged.
        slots, rank: of how many adapters there is room, and for how large a rank.

    Returns:
        What was found. The graph takes more inputs at its end: slots [T] and [N] int32 of rows and of rows of logits, then a, b and scales
        of each site.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    owned = {placeholder: _parts(index, merges, modules) for index, placeholder in enumerate(placeholders)}
    by_role = dict(zip(roles, placeholders, strict=True))
    tokens = symbol(shape_of(by_role["input_ids"])[-1])
    wanted = by_role.get("logits_rows")
    logits = None if wanted is None else symbol(shape_of(wanted)[0])
    found = [product for node in graph.nodes if (product := _product(node, owned, tokens, logits)) is not None]
    if not found:
        return ()
    inputs = _Inputs(placeholders[-1], value_of(found[0].given))
    step_slots = inputs.add("lora_slots", (shape_of(by_role["input_ids"])[-1],), torch.int32)
    logits_slots = inputs.add("lora_logits_slots", (shape_of(wanted)[0],) if wanted is not None else (2,), torch.int32)
    for index, (node, given, site) in enumerate(found):
        names_and_dtypes = (("a", site.dtype), ("b", site.dtype), ("scales", torch.float32))
        factors = [
            inputs.add(f"lora_{index}_{name}", shape, kind)
            for (name, kind), shape in zip(names_and_dtypes, site.shapes(slots, rank), strict=True)
        ]
        with graph.inserting_after(node):
            added = graph.call_function(LORA, (node, given, *factors, logits_slots if site.of_logits else step_slots, list(site.rows)))
        value = value_of(node)
        added.meta["example_value"] = value.new_empty(value.shape)
        if "nn_module_stack" in node.meta:
            added.meta["nn_module_stack"] = node.meta["nn_module_stack"]
        for user in [user for user in node.users if user is not added]:
            user.replace_input_with(node, added)
    graph.lint()
    return tuple(product.site for product in found)


class _Product(NamedTuple):
    node: fx.Node
    given: fx.Node
    site: LoraSite


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


def _parts(index: int, merges: Sequence[Merge], modules: Mapping[int, str]) -> list[tuple[str, int | None]]:
    """The linear layers whose weights this input of the graph holds now, with their rows, None for all; none if not all are known."""
    merge = next((merge for merge in merges if merge.inputs[0] == index), None)
    parts = [(index, None)] if merge is None else list(zip(merge.inputs, merge.rows, strict=True))
    return [(modules[each], rows) for each, rows in parts] if all(each in modules for each, _ in parts) else []


def _product(node: fx.Node, owned: Mapping[fx.Node, list[tuple[str, int | None]]], tokens: Any, logits: Any) -> _Product | None:
    """A product with a linear layer's weight, what is multiplied, and where that is."""
    names = _OPERANDS.get(node.target) if node.op == "call_function" else None
    if names is None:
        return None
    operands = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
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
    return _Product(node, given, LoraSite(parts, columns, value_of(node).dtype, of_logits))


def _rows(node: fx.Node) -> Any:
    """How many rows a tensor [1, T, n] or [T, n] has; None for others."""
    *leading, last = (symbol(size) for size in shape_of(node))
    sizes = [size for size in leading if size != 1]
    return sizes[0] if len(sizes) == 1 and isinstance(last, int) else None
