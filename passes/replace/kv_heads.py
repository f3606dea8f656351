"""Undoes repeat_kv: finds the keys or values before they were repeated over query heads, however that was written.

Before: k [1, kv_heads, T, dim] -> expand / reshape / repeat_interleave / broadcast_to ... -> [1, q_heads, T, dim] -> attention
After:  the node before the repetition, and how its dims become [T, kv_heads, dim].
Proved, not matched: the chain of shape operations is evaluated on a tensor of distinct numbers.
Declines: anything in the chain that computes or is written in place; then the keys stay as attention receives them.

Where keys were repeated before something else was computed on them (a rotary embedding), attention receives heads of which every group-th
is enough. `has_equal_heads` proves that by evaluating what lies between the projections and attention on random numbers: all heads of a
group must be bitwise equal. It is asked only where keys and values disagree on how many heads there are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import name_of, shape_at, shape_of, size_at, symbol, value_of
from paged_attn.passes.fx.memory import is_written
from paged_attn.passes.fx.slicing import ancestors, evaluate

aten = torch.ops.aten
_SHAPE_METHODS = {"expand", "reshape", "view", "unsqueeze", "squeeze", "flatten", "unflatten", "transpose", "permute", "contiguous",
                  "repeat", "repeat_interleave", "broadcast_to", "expand_as", "swapaxes", "clone", "movedim"}  # fmt: skip
_SHAPE_FUNCTIONS = {operator.getitem, torch.broadcast_to, torch.repeat_interleave, torch.transpose, torch.unsqueeze, torch.reshape,
                    torch.flatten, torch.permute, torch.movedim}  # fmt: skip
PROBE_TOKENS = 3
MAX_CHAIN = 16
_PROJECTIONS = {"linear", "matmul", "addmm", "bmm", "embedding", "conv1d", "baddbmm", "einsum"}
COMPARED_TOKENS = 5
MAX_NODES = 300


@dataclass(frozen=True)
class KVSource:
    """`base` with its unit dims squeezed, permuted by `order` and every `step`-th head taken is [T, num_heads, dim]."""

    base: fx.Node
    squeeze: tuple[int, ...]
    order: tuple[int, ...]
    num_heads: int
    step: int = 1


def as_received(node: fx.Node, num_heads: int) -> KVSource:
    """The operand [1, heads, T, dim] that an attention receives, of which `num_heads` heads are distinct."""
    heads = int(shape_of(node)[1])
    return KVSource(node, (0,), (1, 0, 2), num_heads, heads // num_heads)


def kv_source(repeated: fx.Node, user: fx.Node, form: CallForm) -> KVSource:
    """The ancestor with the fewest heads from which shape operations and head repetition make `repeated` [1, heads, T, dim].

    Nothing may be written in place between it and the attention `user`. If several have as few heads it is the first of them, since
    layers that share keys each repeat them.
    """
    best = as_received(repeated, int(shape_of(repeated)[1]))
    for source in unrepeated(best, user, form):
        if source.num_heads <= best.num_heads:
            best = source
    return best


def unrepeated(received: KVSource, user: fx.Node, form: CallForm) -> Iterator[KVSource]:
    """The ancestors of `received` from which shape operations and repetition of heads make it, the nearest first; only those that are
    not written in place before `user`."""
    for base, chain in _shape_ancestors(received.base):
        source = _proved_source(base, chain, received, form)
        if source is not None and not is_written({base, *chain}, chain[0], user):
            yield source


def _shape_ancestors(node: fx.Node) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    chain: list[fx.Node] = []
    for _ in range(MAX_CHAIN):
        inputs = [n for n in node.all_input_nodes if isinstance(value_of(n), Tensor)]
        if not is_shape_operation(node) or not inputs or node.args[0] is not inputs[0]:
            return
        if len(inputs) > 1 and node.target != "expand_as":
            return
        chain.insert(0, node)
        node = inputs[0]
        yield node, list(chain)


def is_shape_operation(node: fx.Node) -> bool:
    """Whether a node only moves or repeats the numbers of its first input."""
    return node.target in (_SHAPE_METHODS if node.op == "call_method" else _SHAPE_FUNCTIONS) or _moves_nothing(node)


def _moves_nothing(node: fx.Node) -> bool:
    """Whether it is `keys.to(device)` on the same device, which layers that share keys may call."""
    source = node.args[0] if node.args else None
    if node.op != "call_method" or node.target != "to" or not isinstance(source, fx.Node):
        return False
    given = [*node.args[1:], *node.kwargs.values()]
    return all(isinstance(each, (torch.device, str)) for each in given) and value_of(node).device == value_of(source).device


def on_distinct_numbers(base: fx.Node, chain: list[fx.Node], form: CallForm) -> tuple[Tensor, Tensor]:
    """(distinct numbers from 0 on, shaped like `base` in a probe; the result of `chain` on them), on the CPU."""
    sizes = shape_at(base, form.num_tokens, PROBE_TOKENS)
    numbers = torch.arange(math.prod(sizes)).view(sizes)
    given: dict[fx.Node, Any] = {base: numbers}
    for other in {other for node in chain for other in node.all_input_nodes} - {base, *chain}:
        given[other] = concrete(value_of(other), form)
    return numbers, evaluate(chain, given, chain[-1]).cpu()  # `_moves_nothing` moves these


def _proved_source(base: fx.Node, chain: list[fx.Node], received: KVSource, form: CallForm) -> KVSource | None:
    source = _by_heads(base, int(shape_of(received.base)[-1]), form)
    if source is None or source.num_heads >= received.num_heads or received.num_heads % source.num_heads:
        return None
    numbers, result = on_distinct_numbers(base, chain, form)
    expected = rows_in(numbers, source).repeat_interleave(received.num_heads // source.num_heads, dim=1)
    return source if torch.equal(rows_in(result, received), expected) else None


def _by_heads(base: fx.Node, dim: int, form: CallForm) -> KVSource | None:
    """How `base` can be viewed as [T, heads, dim]; None if its shape does not allow it."""
    shape = shape_of(base)
    if symbol(shape[-1]) != dim or len(shape) < 3:
        return None
    token_dims = [i for i, size in enumerate(shape) if symbol(size) == form.num_tokens]
    middle = [i for i in range(len(shape) - 1) if i not in token_dims]
    if len(token_dims) != 1 or any(not isinstance(symbol(shape[i]), int) for i in middle):
        return None
    wide = [i for i in middle if int(shape[i]) != 1]
    if len(wide) > 1:
        return None
    head_dim = wide[0] if wide else max(middle)
    squeeze = tuple(i for i in middle if i != head_dim)
    kept = [i for i in range(len(shape)) if i not in squeeze]
    order = (kept.index(token_dims[0]), kept.index(head_dim), kept.index(len(shape) - 1))
    return KVSource(base, squeeze, order, int(shape[head_dim]))


def head_rows(source: KVSource) -> fx.Node:
    """[T, heads, dim] as a view of the source; created at the graph's insertion point."""
    node, call = source.base, source.base.graph.call_function
    for dim in sorted(source.squeeze, reverse=True):
        node = call(aten.select.int, (node, dim, 0))
    if source.order != (0, 1, 2):
        node = call(aten.permute.default, (node, list(source.order)))
    return node if source.step == 1 else call(aten.slice.Tensor, (node, 1, 0, 2**63 - 1, source.step))


def rows_in(tensor: Tensor, source: KVSource) -> Tensor:
    """`head_rows` applied to a tensor with the shape of the source's base."""
    for dim in sorted(source.squeeze, reverse=True):
        tensor = tensor.select(dim, 0)
    return tensor.permute(source.order)[:, :: source.step]


def concrete(value: Any, form: CallForm) -> Any:
    """A tensor of the probe's shape, a torch.Size or a number, for an argument of the chain other than the keys."""
    if isinstance(value, Tensor):
        return torch.zeros(shape_at(value, form.num_tokens, PROBE_TOKENS))
    if isinstance(value, tuple):
        return torch.Size(size_at(size, form.num_tokens, PROBE_TOKENS) for size in value)
    return size_at(value, form.num_tokens, PROBE_TOKENS)


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
        return COMPARED_TOKENS
    if not isinstance(value, Tensor) or role == "owned":
        return values[node]
    size = shape_at(value, form.num_tokens, COMPARED_TOKENS)
    if not value.dtype.is_floating_point:
        return torch.arange(COMPARED_TOKENS, device=value.device).expand(size)
    return torch.randn(size, generator=generator).to(value.device, value.dtype)
