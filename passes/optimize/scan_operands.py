"""Lets ops on recurrent states read their operands in place, so that copies become dead code.

Before: projection [1, T, N] -> views, slices, copies, cat -> x [T, C] -> paged_attn.short_conv_with_output
After:  projection [T, N] -> paged_attn.short_conv_with_output, with the columns in numbers
Before: query, key [1, T, key heads, K] -> repeat_interleave, expand, reshape ... -> [T, H, K] -> paged_attn.gated_delta_rule_with_output
After:  query, key [T, key heads, K] -> the same op, which reads each for all of its value heads
Proved, not matched: the operations in between are evaluated on a tensor of distinct numbers.
Left alone: chains that compute something or are written to. For convolutions: several projections, columns that occur twice or in an order
that a few numbers cannot express, and views that copy nothing. For delta rules: a query and a key with different numbers of heads, and
Kimi's rule (no model repeats keys for it, and other packages' kernels were not tried with fewer).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from paged_attn.attn_ops.ops.scans import GATED_DELTA_RULE, SHORT_CONV
from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import JOINS, MOVES, call_with_value, name_of, shape_of, value_of
from paged_attn.passes.fx.memory import is_written
from paged_attn.passes.replace.kv_heads import PROBE_TOKENS, KVSource, head_rows, on_distinct_numbers, rows_in, unrepeated

MAX_NODES = 64
MOST_PARTS = 8
LEAST_WIDTH = 8  # least adjacent elements that a kernel reads together


def read_columns_in_place(graph: fx.Graph, form: CallForm) -> int:
    """Rewrites in place; returns how many convolutions now read a projection's columns."""
    found = 0
    for node in [node for node in graph.nodes if node.target is SHORT_CONV]:
        x, weight, bias, output, activation, columns, *state = node.args
        source = None if columns else _joined(x)
        if source is None or is_written({source[0], *source[1]}, source[1][0], node):
            continue
        base, chain = source
        parts = _parts_of(base, chain, form)
        if parts is None:
            continue
        with graph.inserting_before(chain[0]):
            rows = base if value_of(base).dim() == 2 else call_with_value(graph, torch.select, base, 0, 0)
        node.args = (rows, weight, bias, output, activation, parts, *state)
        _made_like(output, x, rows)
        found += 1
    return found


def _joined(x: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The one tensor from which `x` is made without computing anything, and the nodes in between, a `cat` among them, in graph order;
    None if there is no such tensor."""
    pending, chain = {x}, set[fx.Node]()
    while pending:
        latest = max(pending)
        if name_of(latest) not in MOVES | JOINS or len(chain) == MAX_NODES:
            break
        pending.remove(latest)
        chain.add(latest)
        pending.update(node for node in latest.all_input_nodes if has_tensors(value_of(node)))
    if len(pending) != 1 or not any(name_of(node) in JOINS for node in chain):
        return None
    base = pending.pop()
    return (base, sorted(chain)) if isinstance(value_of(base), Tensor) else None


def has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(isinstance(each, Tensor) for each in value))


def _parts_of(base: fx.Node, chain: list[fx.Node], form: CallForm) -> list[int] | None:
    """The op's `columns` for the chain's last node [T, C]; None if no numbers say them."""
    columns = _columns(base, chain, form)
    parts = _evenly(columns)
    if not columns or len(set(columns)) < len(columns) or len(parts) > MOST_PARTS or any(width < LEAST_WIDTH for *_, width in parts):
        return None
    return [number for part in parts for number in part]


def _columns(base: fx.Node, chain: list[fx.Node], form: CallForm) -> list[int]:
    """The columns of its own row of `base` [T, N] or [1, T, N] that each row of the chain's last node holds, in order; none if rows differ
    in that."""
    numbers, result = on_distinct_numbers(base, chain, form)
    if numbers.shape[:-1] not in ((PROBE_TOKENS,), (1, PROBE_TOKENS)):
        return []
    result = result.reshape(PROBE_TOKENS, -1)
    alike = torch.equal(result, result[:1] + numbers.shape[-1] * torch.arange(PROBE_TOKENS)[:, None])
    return result[0].tolist() if alike else []


def columns_of(part: fx.Node, form: CallForm) -> tuple[fx.Node, list[int]] | None:
    """The tensor [T, N] or [1, T, N] of which `part` is a view or copy of evenly spaced columns, in order, and the four numbers that name
    them; None if it is not."""
    base, *chain = moved_from(part)
    parts = _evenly(_columns(base, chain or [base], form))
    return (base, list(parts[0])) if len(parts) == 1 else None


def moved_from(part: fx.Node) -> list[fx.Node]:
    """The tensor of which `part` is a view or copy that computes nothing, and what makes it of that, in graph order; `part` at the end."""
    chain = [part]
    while name_of(chain[0]) in MOVES and isinstance(source := chain[0].args[0], fx.Node) and len(chain) <= MAX_NODES:
        chain.insert(0, source)
    return chain


def _evenly(columns: list[int]) -> list[tuple[int, int, int, int]]:
    """(first column, groups, distance between groups, width of each) for runs of adjacent columns, evenly spaced runs in one tuple."""
    runs: list[list[int]] = []
    for column in columns:
        if runs and column == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([column, 1])
    parts: list[tuple[int, int, int, int]] = []
    for start, width in runs:
        first, groups, apart, wide = parts[-1] if parts else (0, 0, 0, 0)
        if wide == width and start > first and (groups == 1 or start - first == groups * apart):
            parts[-1] = first, groups + 1, start - first if groups == 1 else apart, width
        else:
            parts.append((start, 1, 0, width))
    return parts


def _made_like(output: fx.Node, x: fx.Node, rows: fx.Node) -> None:
    """If `output` is an empty tensor like `x`, makes it like as many columns of `rows` instead, so that `x` becomes dead code."""
    if name_of(output) == "empty_like" and output.args[0] is x:
        with output.graph.inserting_before(output):
            columns = call_with_value(output.graph, torch.narrow, rows, 1, 0, int(value_of(x).shape[1]))
            output.args = (columns, *output.args[1:])


def read_unrepeated_heads(graph: fx.Graph, form: CallForm) -> int:
    """Rewrites in place; returns how many delta rules now have fewer query and key heads."""
    found = 0
    for node in [node for node in graph.nodes if node.target is GATED_DELTA_RULE]:
        query, key, *others = node.args
        one, other = (_source(each, node, form) for each in (query, key))
        if one is None or other is None or one.num_heads != other.num_heads:
            continue
        with graph.inserting_before(node), enable_python_dispatcher():
            node.args = (*(_rows(source, node) for source in (one, other)), *others)
        found += 1
    return found


def _source(repeated: fx.Node, user: fx.Node, form: CallForm) -> KVSource | None:
    """The ancestor with the fewest heads from which `repeated` [T, H, K] is made by repeating heads, without computing anything."""
    received = KVSource(repeated, (), (0, 1, 2), int(shape_of(repeated)[1]))
    return min(unrepeated(received, user, form), key=lambda source: source.num_heads, default=None)


def _rows(source: KVSource, user: fx.Node) -> fx.Node:
    """[T, key heads, K], created in the module of `user`."""
    node = made = head_rows(source)
    while made is not source.base:
        made.meta["nn_module_stack"] = user.meta.get("nn_module_stack")
        made = made.args[0]  # type: ignore[assignment]
    node.meta["example_value"] = rows_in(value_of(source.base), source)
    return node
