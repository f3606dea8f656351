"""How the rows of tokens lie in a tensor, and how an operation that only moves numbers changes that, found on distinct numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from paged_attn.passes.fx.graph_tools import call, depends_on, name_of, symbol, token_dims, value_of

LENGTHS = (5, 7)
# Raised by operations whose arguments do not fit.
MISFITS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Rows:
    """Index i along `axis`, of `before` * T * `after`, belongs to row i // after % T."""

    axis: int
    before: int = 1
    after: int = 1

    @property
    def kind(self) -> tuple[int, int]:
        """Equal for layouts that differ only in their axis."""
        return self.before, self.after


SIZES = "sizes"  # in place of a layout: numbers read off a tensor's shape


def reads_sizes(node: fx.Node) -> bool:
    """Whether a node returns sizes of a tensor."""
    return name_of(node) in ("size", "sym_size") and not isinstance(value_of(node), Tensor)


def times(size: Any, tokens: Any) -> int | None:
    """The factor k of a size k * T: 0 if the size does not depend on T, None if it is not a multiple of T."""
    if not depends_on(size, tokens):
        return 0
    quotient = symbol(size) / tokens
    return int(quotient) if quotient.is_Integer else None


def row_axis(value: Any, tokens: Any) -> tuple[int, int] | None:
    """The one axis of a tensor that depends on T, and k where its size is k * T."""
    if not isinstance(value, Tensor):
        return None
    found = [(axis, count) for axis, size in enumerate(value.shape) if (count := times(size, tokens)) != 0]
    return (found[0][0], found[0][1]) if len(found) == 1 and found[0][1] is not None else None


def plain_rows(value: Any, tokens: Any) -> Rows | None:
    """The layout of a tensor with one axis of T rows, without looking at how it was made."""
    found = row_axis(value, tokens)
    return Rows(found[0]) if found is not None and found[1] == 1 else None


def has_rows(value: Any, tokens: Any) -> bool:
    """Whether a tensor, or one in a tuple of tensors, depends on T."""
    if isinstance(value, (tuple, list)):
        return any(has_rows(each, tokens) for each in value)
    return token_dims(value, tokens) > 0


def with_tokens(value: Any, tokens: Any, length: int) -> Any:
    """A number, or a tuple of numbers, for T = `length`. Raises ValueError if another symbol is involved."""
    if isinstance(value, (tuple, list)):
        return type(value)(with_tokens(each, tokens, length) for each in value)
    if not isinstance(value, SymInt):
        return value
    expression = symbol(value)
    number = expression if isinstance(expression, int) else expression.subs(tokens, length)
    if not isinstance(number, int) and not number.is_Integer:
        raise ValueError(f"{value} depends on more than the number of tokens")
    return int(number)


def moved_rows(node: fx.Node, given: Mapping[fx.Node, Rows], tokens: Any) -> Any:
    """The layout(s) of the output of an operation that moves or repeats numbers; None if rows do not stay together.

    Every output row must be made of the same elements of the same row of the operands, whatever T is.

    Args:
        given: the layouts of all tensor operands.
    """
    if not given:
        return None
    found = []
    for length in LENGTHS:
        try:
            result, step = _on_distinct_numbers(node, given, tokens, length)
        except MISFITS:
            return None
        several = isinstance(result, (tuple, list))
        made, traced = (result, value_of(node)) if several else ([result], [value_of(node)])
        if len(made) != len(traced):
            return None  # parts of a fixed number of rows: how many there are depends on T
        found.append([_layouts(*part, step, tokens, length) for part in zip(made, traced, strict=True)])
    chosen = [next((layout for layout in one if one[layout] == two.get(layout)), None) for one, two in zip(*found, strict=True)]
    if any(layout is None for layout in chosen):
        return None
    return tuple(chosen) if several else chosen[0]


def _on_distinct_numbers(node: fx.Node, given: Mapping[fx.Node, Rows], tokens: Any, length: int) -> tuple[Any, int]:
    """The operation's result on operands that hold distinct numbers, and the difference between these numbers in successive rows."""
    shapes = {each: [int(with_tokens(size, tokens, length)) for size in value_of(each).shape] for each in given}
    widths = {each: torch.Size(shape).numel() // length for each, shape in shapes.items()}
    step, start, known = sum(widths.values()) + 1, 0, dict[fx.Node, Tensor]()
    for each, layout in given.items():
        known[each] = _numbered(shapes[each], layout, length, step, start)
        start += widths[each]

    def value(argument: fx.Node) -> Any:
        return known[argument] if argument in known else with_tokens(value_of(argument), tokens, length)

    return call(node, fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)), step


def _numbered(shape: list[int], layout: Rows, length: int, step: int, start: int) -> Tensor:
    rest = [size for axis, size in enumerate(shape) if axis != layout.axis]
    width = layout.before * layout.after * torch.Size(rest).numel()
    numbers = torch.arange(length)[:, None] * step + start + torch.arange(width)
    return numbers.view(length, layout.before, layout.after, *rest).transpose(0, 1).reshape(-1, *rest).movedim(0, layout.axis).contiguous()


def _layouts(made: Any, traced: Any, step: int, tokens: Any, length: int) -> dict[Rows, list[int]]:
    """All layouts under which every row of `made` holds the same numbers up to its row offset, each with row 0's numbers."""
    axis = row_axis(traced, tokens)
    if axis is None or not isinstance(made, Tensor) or made.dtype != torch.int64:
        return {}
    found = {}
    for after in range(axis[1], 0, -1):
        before, rest = divmod(axis[1], after)
        if rest:
            continue
        rows = made.movedim(axis[0], 0).reshape(before, length, after, -1).transpose(0, 1).reshape(length, -1)
        own = rows - step * torch.arange(length)[:, None]
        if bool((own == own[:1]).all()):
            found[Rows(axis[0], before, after)] = own[0].tolist()
    return found
