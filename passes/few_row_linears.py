"""Linears with 16-bit weights on a GPU call an op that has a kernel of its own for few rows (decoding)."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from paged_attn.attn_ops.linear_op import LINEAR
from paged_attn.passes.call_form import CallForm
from paged_attn.passes.graph_tools import symbol, value_of, writes_in_place, written_values

logger = logging.getLogger("paged_attn")
_LINEAR = (F.linear, torch.ops.aten.linear.default)
_MULTIPLE = 64  # of which both sizes of a weight must be, so that its rows are aligned and fill blocks


def use_few_row_linears(graph: fx.Graph, form: CallForm, values: dict[fx.Node, Any], device_type: str = "cuda") -> int:
    """Replace them in place; after `merge_linears`, as one op has one weight.

    Args:
        values: the real tensor of each placeholder.
        device_type: where the weights must be.

    Returns:
        How many were replaced.
    """
    written = {value for node in graph.nodes if writes_in_place(node) for value in written_values(node)}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _LINEAR:
            continue
        given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
        x, weight, bias = given["input"], given["weight"], given.get("bias")
        owned = [value for value in (weight, bias) if value is not None]
        tensors = [_owned_tensor(value, form, values) for value in owned]
        if written & set(owned) or not all(_is_fit(tensor, device_type) for tensor in tensors) or not _fits(node, x, owned):
            continue
        with graph.inserting_before(node):
            new = graph.call_function(LINEAR, (x, weight, bias))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        count += 1
    if count:
        logger.info("%d linears use a kernel of their own for few rows", count)
    return count


def _owned_tensor(node: Any, form: CallForm, values: dict[fx.Node, Any]) -> Any:
    """The parameter, buffer or tensor of the graph that a node stands for; None for anything computed."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "get_attr":
        value: Any = node.graph.owning_module
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        return value
    return values[node] if form.roles.get(node) == "owned" else None


def _is_fit(value: Any, device_type: str) -> bool:
    """An ordinary tensor, and no subclass (quantised weights)."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout == torch.strided
        and value.device.type == device_type
        and value.dtype in (torch.bfloat16, torch.float16)
        and value.is_contiguous()
    )


def _fits(node: fx.Node, x: Any, owned: list[Any]) -> bool:
    """Shapes and dtypes as traced: a merged weight has other rows than the tensor that was given for it."""
    value, result = value_of(x), value_of(node)
    shapes = [value_of(o) for o in owned]
    if not isinstance(value, Tensor) or not isinstance(result, Tensor) or not all(isinstance(s, Tensor) for s in shapes):
        return False
    weight = shapes[0]
    one_row_of_tokens = value.dim() == 2 or (value.dim() == 3 and symbol(value.shape[0]) == 1)
    sizes = [symbol(size) for size in weight.shape]
    known = len(sizes) == 2 and all(isinstance(size, int) and size % _MULTIPLE == 0 for size in sizes)
    return one_row_of_tokens and known and {v.dtype for v in (value, result, *shapes)} == {weight.dtype}  # several: autocast
