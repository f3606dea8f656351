"""Finds one key per KV head where keys were repeated over heads before something else was computed on them.

Before: k -> broadcast over query heads -> rotary embedding -> [1, q_heads, T, dim] -> attention
After:  every group-th head of what attention receives.
Proved by evaluating what lies between the projections and attention on random numbers: all heads of a group must be bitwise equal.
Runs only where keys and values disagree on how many heads there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import name_of, shape_at, shape_of, value_of
from paged_attn.passes.fx.slicing import ancestors, evaluate

_PROJECTIONS = {"linear", "matmul", "addmm", "bmm", "embedding", "conv1d", "baddbmm", "einsum"}
PROBE_TOKENS = 5
MAX_NODES = 300


def has_equal_heads(operand: fx.Node, user: fx.Node, num_heads: int, form: CallForm, values: Values) -> bool:
    """Whether the heads of `operand` [1, heads, T, dim], as the attention `user` receives them, are `num_heads` runs of equal heads."""
    heads = int(shape_of(operand)[1])
    nodes = ancestors(operand, user, frozenset(node for node in operand.graph.nodes if _is_projection(node)))
    if heads % num_heads or len(nodes) > MAX_NODES:
        return False
    generator = torch.Generator().manual_seed(0)
    given = {node: _given(node, form, values, generator) for node in nodes if node.op == "placeholder" or _is_projection(node)}
    result = evaluate(nodes, given, operand)
    groups = result.unflatten(1, (num_heads, heads // num_heads))
    return bool((groups == groups[:, :, :1]).all())


def _is_projection(node: fx.Node) -> bool:
    return name_of(node) in _PROJECTIONS


def _given(node: fx.Node, form: CallForm, values: Values, generator: torch.Generator) -> Any:
    role, value = form.roles.get(node, ""), value_of(node)
    if role == "tokens":
        return PROBE_TOKENS
    if not isinstance(value, Tensor) or role == "owned":
        return values[node]
    size = shape_at(value, form.num_tokens, PROBE_TOKENS)
    if not value.dtype.is_floating_point:
        return torch.arange(PROBE_TOKENS, device=value.device).expand(size)
    return torch.randn(size, generator=generator).to(value.device, value.dtype)
