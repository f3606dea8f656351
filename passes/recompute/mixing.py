"""Finds numerically which values of each token depend on other tokens: a running sum, a convolution, a shift.

Everything between the model's products with weights and an attention is evaluated twice on random rows, the second time with one changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import Writers, depends_on, shape_at, value_of
from paged_attn.passes.fx.slicing import ancestors, evaluate_all
from paged_attn.passes.fx.token_data import token_axis
from paged_attn.passes.prove.score_subgraph import placeholder_value, zeros_for

TOKENS, CHANGED = 9, 4
ROUNDING = 1e-3


def mixing_nodes(wanted: list[fx.Node], starts: set[fx.Node], form: CallForm, values: Values, writers: Writers) -> set[fx.Node]:
    """The nodes of `wanted` in which changing one row of `starts` changes other rows. All others keep one independent row per token.

    Args:
        wanted: in graph order; made from `starts`, positions, numbers and the model's own tensors.
    """
    if not wanted:
        return set()
    nodes = ancestors(wanted, wanted[-1], starts, writers, through_shapes=False)
    runs = []
    for changed in (False, True):
        generator = torch.Generator().manual_seed(11)
        runs.append(evaluate_all(nodes, _given(nodes, starts, form, values, generator, changed)))
    return {node for node in wanted if node not in starts and _moves(node, form, runs[0].get(node), runs[1].get(node))}


def _given(
    nodes: list[fx.Node], starts: set[fx.Node], form: CallForm, values: Values, generator: torch.Generator, changed: bool
) -> dict[fx.Node, Any]:
    shape_only = {source for node in nodes if node not in starts for source in node.all_input_nodes}.difference(nodes)
    given: dict[fx.Node, Any] = {node: zeros_for(node, form, TOKENS) for node in shape_only if isinstance(value_of(node), Tensor)}
    for node in nodes:
        if node in starts:
            given[node] = _rows(node, form, generator, changed)
        elif node.op == "placeholder":
            given[node] = _placeholder(form.roles[node], values[node], generator, changed)
    return given


def _rows(node: fx.Node, form: CallForm, generator: torch.Generator, changed: bool) -> Tensor:
    value = value_of(node)
    rows, others = (torch.randn(shape_at(node, form.num_tokens, TOKENS), generator=generator) for _ in range(2))
    for axis, size in enumerate(value.shape):
        if changed and depends_on(size, form.num_tokens):
            rows.select(axis, CHANGED).copy_(others.select(axis, CHANGED))
    return rows.to(value.device, value.dtype)


def _placeholder(role: str, value: Any, generator: torch.Generator, changed: bool) -> Any:
    ids = torch.empty(0)
    if role == "input_ids":
        ids = torch.randint(2, 16, (TOKENS,), generator=generator)
        ids[CHANGED] += int(changed)
    return placeholder_value(role, value, (TOKENS,), ids)


def _moves(node: fx.Node, form: CallForm, one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or one.numel() == 0:
        return False
    if (axis := token_axis(node, form)) is not None:
        rest = torch.tensor([row for row in range(TOKENS) if row != CHANGED], device=one.device)
        one, other = (value.index_select(axis, rest) for value in (one, other))
    one, other = one.double(), other.double()
    limit = ROUNDING * float(one.nan_to_num().abs().max().clamp_min(1e-6))
    return not torch.allclose(one, other, rtol=0, atol=limit, equal_nan=True)
