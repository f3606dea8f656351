"""Decomposes flex_attention into written-out attention, which `find_softmax` then finds like any other.

Before: out, lse, ... = flex_attention(q, k, v, score_mod, (.., mask_mod), scale, {..}, score buffers, mask buffers)
After:  out = softmax(where(mask_mod(0, h, i, j), score_mod(scale * q @ k^T, 0, h, i, j), -inf)) @ v
        with both functions inlined over index tensors that broadcast to [heads, T, T]. The block mask only says which blocks of that
        mask are empty; the self-check compares with the original, blocks included.
Declines (raises): the log-sum-exp is used; a function that is not plain operations; a paged call only.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.find.attention_site import module_path
from paged_attn.passes.fx.graph_tools import arguments_of, call_with_value, shape_of, value_of

_PARAMETERS = (
    "query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_mod_other_buffers", "mask_mod_other_buffers",
)  # fmt: skip


def decompose_flex(graph: fx.Graph) -> None:
    """Rewrite every flex_attention of the graph in place.

    Raises:
        UnsupportedError: see above; the message names the module.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.higher_order.flex_attention:
            _write_out(node)


def _write_out(node: fx.Node) -> None:
    where = f"layer at {module_path(node) or node.name}"
    given = arguments_of(node, _PARAMETERS)
    outputs = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    if len(outputs) != 1 or any(user not in outputs and user.users for user in node.users):
        raise UnsupportedError(f"{where}: flex_attention's log-sum-exp is used; only its output can be")
    graph, query = node.graph, given["query"]
    heads, kv_heads = (int(shape_of(n)[1]) for n in (query, given["key"]))
    with graph.inserting_before(outputs[0]), value_of(query).fake_mode:
        key, value = (_repeated(graph, given[name], heads // kv_heads) for name in ("key", "value"))
        transposed = call_with_value(graph, "transpose", key, 2, 3)
        products = call_with_value(graph, torch.matmul, query, transposed)
        scores = call_with_value(graph, operator.mul, products, given["scale"])
        tokens = call_with_value(graph, torch.ops.aten.sym_size.int, query, 2)
        column = call_with_value(graph, torch.arange, tokens)
        head = call_with_value(graph, "view", call_with_value(graph, torch.arange, heads), heads, 1, 1)
        row = call_with_value(graph, "unsqueeze", column, 1)
        index = (call_with_value(graph, torch.zeros, (), dtype=torch.int32), head, row, column)
        scores = _inlined(graph, given["score_mod"], (scores, *index, *given.get("score_mod_other_buffers", ())), where)
        visible = _inlined(graph, given["block_mask"][-1], (*index, *given.get("mask_mod_other_buffers", ())), where)
        masked = call_with_value(graph, torch.where, visible, scores, float("-inf"))
        weights = call_with_value(graph, F.softmax, masked, dim=-1)
        result = call_with_value(graph, torch.matmul, weights, value)
    for new in (weights, result):
        new.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    result.meta.update(original_name=outputs[0].name, found_by="flex_attention")
    outputs[0].replace_all_uses_with(result)
    for old in (*node.users, node):
        graph.erase_node(old)


def _repeated(graph: fx.Graph, node: fx.Node, times: int) -> fx.Node:
    """Keys or values [1, kv_heads, T, dim], repeated for each query head; `kv_heads` undoes this later."""
    if times == 1:
        return node
    _, heads, _, dim = shape_of(node)
    grouped = call_with_value(graph, "expand", call_with_value(graph, "unsqueeze", node, 2), 1, heads, times, -1, dim)
    return call_with_value(graph, "reshape", grouped, 1, heads * times, -1, dim)


def _inlined(graph: fx.Graph, function: Any, arguments: tuple[Any, ...], where: str) -> Any:
    """Applies the operations of a score_mod or mask_mod, which is written for scalars, to tensors that broadcast."""
    module = getattr(graph.owning_module, str(function.target))
    results: dict[fx.Node, Any] = {}
    given = iter(arguments)
    for node in module.graph.nodes:
        args, kwargs = (fx.map_arg(a, lambda n: results[n]) for a in (node.args, dict(node.kwargs)))
        if node.op == "placeholder":
            results[node] = next(given)
        elif node.op == "output":
            return args[0][0] if isinstance(args[0], (tuple, list)) else args[0]
        elif node.op in ("call_function", "call_method"):
            try:
                results[node] = call_with_value(graph, node.target, *args, **kwargs)
            except GuardOnDataDependentSymNode as error:
                raise UnsupportedError(
                    f"{where}: a score_mod or mask_mod of flex_attention picks by the values of a tensor ({node.format_node()}), which has "
                    "no form for all tokens at once"
                ) from error
        else:
            raise UnsupportedError(
                f"{where}: a score_mod or mask_mod of flex_attention holds {node.format_node()}; known are plain operations"
            )
    raise AssertionError("an FX graph ends with its output")
