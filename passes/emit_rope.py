"""RoPE of query and key and the store of K and V become one op in front of attention.

Before: q = rotate(q0, cos, sin); k = rotate(k0, cos, sin); attention(q, k, v, out, layer_id, True)
After:  q = aten.new_empty(q0, ..); rope_and_store_kv(q0, k0, v, cos', sin', q, layer_id); attention(q, k0, v, out, layer_id, False)
        with cos', sin' [T, pairs], sliced where cos and sin are made, for all layers that share them.
Attention without a store reads K and V of all tokens, the new ones too, in the pool: k0 tells it shapes and dtypes only.
Proved by `find_rotation`. Left alone: layers whose keys are another's, whose rotation something else reads, or that have none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from paged_attn.attn_ops.op import UNIFIED_ATTENTION
from paged_attn.attn_ops.rope_op import ROPE_AND_STORE_KV
from paged_attn.attn_ops.spec import AttentionSpec
from paged_attn.passes.call_form import CallForm
from paged_attn.passes.find_rotation import Rotation, RotationFinder
from paged_attn.passes.graph_tools import call_with_value, remove_dead_code, symbol, value_of
from paged_attn.passes.kv_heads import head_rows
from paged_attn.passes.rotation_values import Turn
from paged_attn.passes.token_data import name_of, read_inputs

logger = logging.getLogger("paged_attn")
aten = torch.ops.aten
_TO_THE_END = 2**63 - 1


def use_rope_and_store(graph: fx.Graph, form: CallForm, values: dict[fx.Node, Any], specs: Sequence[AttentionSpec]) -> tuple[int, ...]:
    """Rewrite in place, after attention was replaced and positions are the batch's own; returns the layers that the op serves now.

    Args:
        values: the real tensor (or number) behind each placeholder.
        specs: of the layers, by layer id.
    """
    finder = RotationFinder(graph, form, values)
    found: list[tuple[fx.Node, Rotation, Rotation]] = []
    for op in graph.nodes:
        if op.target is not UNIFIED_ATTENTION or not op.args[5]:
            continue
        spec = specs[op.args[4]]
        query = finder.find(op.args[0], op, spec.num_q_heads, spec.qk_head_dim)
        key = finder.find(op.args[1], op, spec.num_kv_heads, spec.qk_head_dim) if query is not None else None
        if query is not None and key is not None and query.turn == key.turn:
            found.append((op, query, key))
    angles = _Angles()
    for op, query, key in found:
        _emit(op, query, key, angles, form)
    if found:
        remove_dead_code(graph)
        logger.info("%d layers rotate and store in one op", len(found))
    return tuple(op.args[4] for op, *_ in found)  # type: ignore[misc]


def _emit(op: fx.Node, query: Rotation, key: Rotation, angles: _Angles, form: CallForm) -> None:
    graph, with_value = op.graph, partial(call_with_value, op.graph)
    old, _, value, output, layer_id, _ = op.args
    assert isinstance(old, fx.Node)
    with graph.inserting_before(old):
        rows = head_rows(query.source, with_value)
        tokens = with_value(aten.sym_size.int, rows, 0)
        rotated = with_value(aten.new_empty.default, rows, [tokens, *value_of(rows).shape[1:]])
    old.replace_all_uses_with(rotated)
    with graph.inserting_before(op):
        keys = head_rows(key.source, with_value)
        cos, sin = angles.of(query.turn)
        arguments = (rows, keys, value, cos, sin, rotated, layer_id)
        rope = graph.call_function(ROPE_AND_STORE_KV, arguments, {"interleaved": query.turn.interleaved})
    op.args = (rotated, keys, value, output, layer_id, False)
    for node in (rows, tokens, rotated, keys, rope):
        node.meta["nn_module_stack"] = op.meta.get("nn_module_stack")
    for rotation in (query, key):
        _read_shapes_of_source(rotation, form)


def _read_shapes_of_source(rotation: Rotation, form: CallForm) -> None:
    """What looks at the shapes of rotated values would keep the rotation alive."""
    base = rotation.source.base
    for node in rotation.region:
        for reader in [user for user in node.users if user not in rotation.region and node not in read_inputs(user)]:
            if name_of(reader) == "sym_size" and symbol(value_of(node).shape[reader.args[1]]) == form.num_tokens:
                sizes = [symbol(size) for size in value_of(base).shape]
                reader.args = (base, sizes.index(form.num_tokens))
            elif _kind(value_of(node)) == _kind(value_of(base)):
                reader.replace_input_with(node, base)


def _kind(value: Any) -> Any:
    return [value.dtype, *map(symbol, value.shape)] if isinstance(value, torch.Tensor) else value


class _Angles:
    """Cosines and sines as the op takes them: one slice of each for all its users, where the whole is made."""

    def __init__(self) -> None:
        self._made: dict[Turn, tuple[fx.Node, fx.Node]] = {}

    def of(self, turn: Turn) -> tuple[fx.Node, fx.Node]:
        """Both [T, pairs]."""
        key = turn._replace(interleaved=False)
        if key not in self._made:
            self._made[key] = self._sliced(turn, turn.cos, 0), self._sliced(turn, turn.sin, 1)
        return self._made[key]

    def _sliced(self, turn: Turn, root: fx.Node, part: int) -> fx.Node:
        graph, node = root.graph, root
        with graph.inserting_before(root.next):
            if value_of(root).dtype.is_complex:
                node = call_with_value(graph, aten.select.int, call_with_value(graph, aten.view_as_real.default, node), -1, part)
            for dim in reversed(range(value_of(root).dim() - 1)):
                if symbol(value_of(root).shape[dim]) == 1:
                    node = call_with_value(graph, aten.select.int, node, dim, 0)
            if turn.columns == "first half":
                node = call_with_value(graph, aten.slice.Tensor, node, 1, 0, turn.pairs)
            if turn.columns == "every second":
                node = call_with_value(graph, aten.slice.Tensor, node, 1, 0, _TO_THE_END, 2)
        return node
