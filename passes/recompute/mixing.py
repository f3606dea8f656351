"""Which of the values of each token hold something of other tokens: a running sum, a convolution, a shift. Found on numbers.

What is between the model's products with weights and an attention is evaluated on random rows, twice, with one row changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import Writers, depends_on, symbol, value_of
from paged_attn.passes.fx.slicing import evaluate_all
from paged_attn.passes.fx.token_data import read_inputs
from paged_attn.passes.prove.score_subgraph import concrete_shape, zeros_for

TOKENS, CHANGED = 9, 4
ROUNDING = 1e-3


def mixing_nodes(wanted: list[fx.Node], starts: set[fx.Node], form: CallForm, values: dict[fx.Node, Any], writers: Writers) -> set[fx.Node]:
    """Those of `wanted` whose rows change where no row of `starts` does; all others have a row of their own for each token.

    Args:
        wanted: in graph order; made from `starts`, positions, numbers and the model's own tensors.
        values: the real tensor (or number) behind each placeholder.
    """
    nodes = _needed(wanted, starts, writers)
    runs = []
    for changed in (False, True):
        generator = torch.Generator().manual_seed(11)
        runs.append(evaluate_all(nodes, {node: given for node, given in _given(nodes, starts, form, values, generator, changed)}))
    return {node for node in wanted if node not in starts and _moves(node, form, runs[0].get(node), runs[1].get(node))}


def _needed(wanted: list[fx.Node], starts: set[fx.Node], writers: Writers) -> list[fx.Node]:
    last = wanted[-1] if wanted else None
    found, pending = set(wanted), list(wanted)
    while pending:
        node = pending.pop()
        changes = [writer for writer in writers.get(node, ()) if last is not None and writer <= last]
        for source in () if node in starts else (*read_inputs(node), *changes):
            if source not in found:
                found.add(source)
                pending.append(source)
    return sorted(found)


def _given(
    nodes: list[fx.Node], starts: set[fx.Node], form: CallForm, values: dict[fx.Node, Any], generator: torch.Generator, changed: bool
) -> list[tuple[fx.Node, Any]]:
    inside = set(nodes)
    shape_only = {source for node in nodes if node not in starts for source in node.all_input_nodes} - inside
    given = [(node, zeros_for(node, form, TOKENS)) for node in sorted(shape_only) if isinstance(value_of(node), Tensor)]
    for node in nodes:
        if node in starts:
            given.append((node, _rows(node, form, generator, changed)))
        elif node.op == "placeholder":
            given.append((node, _placeholder(form.roles[node], values[node], generator, changed)))
    return given


def _rows(node: fx.Node, form: CallForm, generator: torch.Generator, changed: bool) -> Tensor:
    value = value_of(node)
    rows, others = (torch.randn(concrete_shape(node, form, TOKENS), generator=generator) for _ in range(2))
    for axis, size in enumerate(value.shape):
        if changed and depends_on(size, form.num_tokens):
            rows.select(axis, CHANGED).copy_(others.select(axis, CHANGED))
    return rows.to(value.device, value.dtype)


def _placeholder(role: str, value: Any, generator: torch.Generator, changed: bool) -> Any:
    if role == "tokens":
        return TOKENS
    if role == "position_ids":
        return torch.arange(TOKENS, device=value.device, dtype=value.dtype)[None]
    if role == "input_ids":
        ids = torch.randint(2, 16, (1, TOKENS), generator=generator)
        ids[:, CHANGED] += int(changed)
        return ids.to(value.device, value.dtype)
    return value


def _moves(node: fx.Node, form: CallForm, one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or one.numel() == 0:
        return False
    sizes = value_of(node).shape if isinstance(value_of(node), Tensor) else ()
    axes = [axis for axis, size in enumerate(sizes) if depends_on(size, form.num_tokens)]
    if len(axes) == 1 and symbol(sizes[axes[0]]) == form.num_tokens:
        rest = torch.tensor([row for row in range(TOKENS) if row != CHANGED], device=one.device)
        one, other = (value.index_select(axes[0], rest) for value in (one, other))
    one, other = one.double(), other.double()
    limit = ROUNDING * float(one.nan_to_num().abs().max().clamp_min(1e-6))
    return not torch.allclose(one, other, rtol=0, atol=limit, equal_nan=True)
