"""Which call a graph was traced from: only a row of tokens with no mask or cache of its own can be paged."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx

from paged_attn.passes.fx.graph_tools import embedding_of, of_module, source_name, symbol, value_of

_KEY = re.compile(r"\['(\w+)'\]$|^L\['?(\w+)'?\]$|\.(\w+)$")

_LONGER, _SHORTER = 64, 4  # a guard is tried on calls this many tokens longer and shorter
_MOST_EXCEPTED = 1 << 14
_LARGEST_OFFSET = 16  # most rows of a position table before the first token's
_NO_IDS = (
    "this graph is given no token ids: torch.compile broke the model's forward into several graphs, of which it is one, or the call passes "
    "none. A paged batch needs all of forward in one graph; torch.compile(model, backend='paged_attn', fullgraph=True) says where it breaks"
)
_NO_TOKENS = ("position_ids", "attention_mask", "token_type_ids", "labels")  # inputs [batch, T] that are not token ids


Values = dict[fx.Node, Any]  # by placeholder: the real tensor or number passed to the traced call


class CallNotPaged(Exception):
    """This call cannot run as a paged batch, though the model may: it runs unchanged, outside forward contexts."""


@dataclass(frozen=True)
class CallForm:
    """The token dimension and the inputs of a graph.

    Attributes:
        num_tokens: the sympy symbol of T, or an int if the trace is static.
        roles: per placeholder: "tokens" (T itself), "input_ids", "position_ids", "logits_rows", "num_logits", "owned" (parameters,
            buffers, tensors of the module) or "call:NAME" for any other input of the call.
        reason: why a paged batch cannot run through this graph, or "".
        max_tokens: the longest call for which the trace holds, or None if it holds for all. Only a `reason` if the model has more
            positions than that.
        excepted: some lengths between the shortest and the longest for which it does not hold: the model asks for T % 16 or T == 100.
        known_min_tokens: `min_tokens` for a graph from disk, where it cannot be read off the inputs.
    """

    num_tokens: Any
    roles: dict[fx.Node, str]
    reason: str
    max_tokens: int | None = None
    known_min_tokens: int = 2
    excepted: tuple[int, ...] = ()

    @property
    def min_tokens(self) -> int:
        """The shortest call for which the trace holds."""
        value = value_of(self.input_ids)
        size = value.shape[-1] if isinstance(value, Tensor) else None
        if not isinstance(size, SymInt) or not isinstance(self.num_tokens, sympy.Symbol):
            return self.known_min_tokens
        return max(int(size.node.shape_env.var_to_range[self.num_tokens].lower), 2)

    @property
    def positions(self) -> fx.Node | None:
        return next((node for node, role in self.roles.items() if role == "position_ids"), None)

    @property
    def input_ids(self) -> fx.Node:
        return next(node for node, role in self.roles.items() if role == "input_ids")


def find_call_form(graph: fx.Graph, limited: bool = False) -> CallForm:
    """Read the call form off the placeholders of a Dynamo graph.

    Args:
        limited: the model has no more positions than the trace allows, so tracing a longer call would not help.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    named = {input_name(node): node for node in placeholders if isinstance(value_of(node), Tensor) and not is_owned(node)}
    ids = next((named[name] for name in ("input_ids", "inputs_embeds") if name in named), None)
    if ids is None:  # a positional call: take the only table of token ids
        tables = [node for name, node in named.items() if name not in _NO_TOKENS and _is_table_of_ids(value_of(node))]
        ids = tables[0] if len(tables) == 1 else None
    if ids is None:
        return CallForm(0, {n: _role(n, None, None, None) for n in placeholders}, _NO_IDS)
    batch, length = value_of(ids).shape[:2] if value_of(ids).dim() >= 2 else (None, value_of(ids).shape[0])
    tokens, rows = symbol(length), named.get("logits_to_keep")
    logits = symbol(value_of(rows).shape[0]) if rows is not None and value_of(rows).dim() == 1 else None
    roles = {node: _role(node, tokens, logits, ids) for node in placeholders}
    max_tokens = _upper_bound(length)
    limited = limited or (max_tokens is not None and ends_with_a_table(graph, ids, max_tokens))
    reason = _reason(batch, tokens, None if limited else max_tokens, named, roles) or _fixed_length(length)
    return CallForm(tokens, roles, reason, max_tokens, excepted=() if reason else _excepted(length))


def _is_table_of_ids(value: Tensor) -> bool:
    return value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def ends_with_a_table(graph: fx.Graph, ids: fx.Node, rows: int) -> bool:
    """Whether T rows are read from a table of about `rows` rows other than by token id: then the model has no more positions."""
    tokens = symbol(value_of(ids).shape[-1])
    for node in graph.nodes:
        value = value_of(node)
        if not isinstance(value, Tensor) or all(symbol(size) != tokens for size in value.shape):
            continue
        if looked_up := embedding_of(node):
            index, table = looked_up
            table = None if index is ids else table
        else:
            table = node.args[0] if node.target in (operator.getitem, torch.narrow, "narrow") else None
        sizes = [symbol(size) for size in value_of(table).shape] if isinstance(value_of(table), Tensor) else []
        if all(isinstance(size, int) for size in sizes) and any(rows <= size <= rows + _LARGEST_OFFSET for size in sizes):
            return True
    return False


def _reason(batch: Any, tokens: Any, max_tokens: int | None, named: dict[str, fx.Node], roles: dict[fx.Node, str]) -> str:
    if "inputs_embeds" in named and "input_ids" not in named:
        return "the call passes inputs_embeds; a paged batch has input_ids [1, T]"
    extra = sorted(role.removeprefix("call:") for role in roles.values() if role.startswith("call:"))
    if any(".size()" not in name for name in extra):
        return f"the call passes {', '.join(extra)}, which a paged batch does not have; pass batch.model_inputs() only"
    if batch is None or symbol(batch) != 1:
        return f"the call has input_ids of batch size {batch}; a paged batch is one row, [1, T]"
    if extra:
        return f"the call has the sizes {', '.join(extra)} besides the number of tokens"
    if isinstance(tokens, int):
        return f"the call was traced with a fixed length of {tokens} tokens; pass batch.model_inputs(), which marks T as dynamic"
    if max_tokens is not None:
        return f"the trace holds only for up to {max_tokens} tokens, as the model branches on the length"
    return ""


def _fixed_length(size: Any) -> str:
    """Why the trace holds for one length only though T has no range: the model made a Python number of T, as `math.log` does."""
    if not isinstance(size, SymInt) or not isinstance(size.node.expr, sympy.Symbol):
        return ""
    traced = int(size.node.hint)
    others = [n for n in range(max(traced - _SHORTER, 2), traced + _LONGER) if n != traced]
    for guard in _guards_of(size):
        if not any(_holds(guard, size, length) for length in others):
            return f"the trace holds for one length only, as the model computes with the number of tokens in Python ({guard})"
    return ""


def _guards_of(size: SymInt) -> list[Any]:
    """What the trace asks of T alone, also under the name of another size that equals it (that of position_ids)."""
    env, found = size.node.shape_env, list[Any]()
    for guard in env.guards:
        expression = env.replace(guard.expr).xreplace({env.replace(size.node.expr): size.node.expr})
        found += [expression] if expression.free_symbols == {size.node.expr} else []
    return list(dict.fromkeys(found))


def _excepted(size: Any) -> tuple[int, ...]:
    """Lengths for which a guard does not hold, among short ones and those around its numbers, within the range of the trace."""
    if not isinstance(size, SymInt) or not isinstance(size.node.expr, sympy.Symbol):
        return ()
    bounds, found = size.node.shape_env.var_to_range[size.node.expr], set[int]()
    for guard in _guards_of(size):
        if isinstance(guard, (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)) and size.node.expr in guard.args:
            continue  # the range
        numbers = {int(number) for number in guard.atoms(sympy.Integer) if abs(number) < _MOST_EXCEPTED}
        tried = {*range(2, _LONGER), *(number + more for number in numbers for more in (-1, 0, 1))}
        found |= {n for n in tried if max(bounds.lower, 2) <= n <= bounds.upper and not _holds(guard, size, n)}
    return tuple(sorted(found))


def _holds(guard: Any, size: SymInt, length: int) -> bool:
    """Whether a guard holds for a call of so many tokens; False where torch's functions refuse them."""
    try:
        return bool(guard.xreplace({size.node.expr: sympy.Integer(length)}) == sympy.true)
    except (AssertionError, ZeroDivisionError):  # of a negative number, or modulo zero
        return False


def _upper_bound(size: Any) -> int | None:
    if not isinstance(size, SymInt):
        return None
    bound = size.node.shape_env.var_to_range[size.node.expr].upper if isinstance(size.node.expr, sympy.Symbol) else None
    return int(bound) if bound is not None and bound.is_finite and bound < 2**31 else None


def _role(node: fx.Node, tokens: Any, logits: Any, ids: fx.Node | None) -> str:
    value = value_of(node)
    if isinstance(value, SymInt):
        expression = symbol(value)
        if expression == tokens or source_name(node).endswith("['position_ids'].size()[1]"):
            return "tokens"
        if of_module(source_name(node)):
            return "owned"  # a number of the module; `specialise_numbers` makes it a constant
        return "num_logits" if expression == logits else f"call:{source_name(node)}"
    if is_owned(node):
        return "owned"
    name = input_name(node)
    if node is ids and name != "inputs_embeds":
        return "input_ids"  # whatever the parameter is called
    if name in ("input_ids", "position_ids"):
        return name
    return "logits_rows" if name == "logits_to_keep" else f"call:{name}"


def is_owned(node: fx.Node) -> bool:
    """Whether a placeholder belongs to the model (parameter, buffer, tensor attribute) rather than to the call."""
    if isinstance(value_of(node), torch.nn.Parameter):
        return True
    source = source_name(node)
    return "_parameters[" in source or "_buffers[" in source or of_module(source) or source.startswith("G[")


def input_name(node: fx.Node) -> str:
    """The keyword under which the caller passed a tensor: `L['kwargs']['input_ids']` is input_ids."""
    match = _KEY.search(source_name(node))
    return next(group for group in match.groups() if group) if match else source_name(node)


class ReadValues(dict[fx.Node, Any]):
    """A dict that records in `read` which values were taken: a proof depends on the contents of those tensors only."""

    def __init__(self, values: dict[fx.Node, Any]) -> None:
        super().__init__(values)
        self.read: set[fx.Node] = set()

    def __getitem__(self, node: fx.Node) -> Any:
        self.read.add(node)
        return super().__getitem__(node)

    def get(self, node: fx.Node, default: Any = None) -> Any:
        self.read.add(node)
        return super().get(node, default)

    def items(self) -> Any:
        self.read.update(self)
        return super().items()

    def values(self) -> Any:
        self.read.update(self)
        return super().values()
