"""The numbers in a mask's subgraph: which are scaled down so that they matter on small probes, which need not be, and which cannot be.

On 59 tokens a window of 4,096 looks like no window. So every large number must be scaled (and then found again as the window or the
chunk), or be known to be harmless (a size, a value that hides); otherwise `hidden_numbers` names it and the mask is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from paged_attn.passes.fx.graph_tools import op_name

LARGEST_SHOWN = 20  # numbers up to this size have an effect on the probes unscaled
NO_LIMIT = 1 << 40  # stands for finfo.min, inf, and the end of an open slice
HIDES = -9984.0  # an additive mask hides at this value and below: -1e4 in bfloat16
SMALL_TENSOR = 32  # tensors of at most this many elements hold parameters of the mask, larger ones a table of positions

_SCALED = {"add", "sub", "rsub", "subtract", "mul", "multiply", "floordiv", "floor_divide", "truediv", "true_divide", "div", "divide",
           "mod", "remainder", "fmod", "neg", "lt", "le", "gt", "ge", "eq", "ne", "less", "less_equal", "greater", "greater_equal",
           "not_equal", "tril", "triu", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "sym_min", "sym_max", "where",
           "full", "full_like", "new_full", "tensor", "scalar_tensor", "fill", "masked_fill", "fill_diagonal", "iadd", "isub", "imul",
           "ifloordiv", "arange"}  # fmt: skip
_TENSORS = {"tensor", "scalar_tensor", "Tensor"}
_FACTORS = {"mul", "multiply", "truediv", "true_divide", "div", "divide", "neg", *_TENSORS}
_SUMS = {"add", "iadd", "sub", "subtract", "rsub", "neg", "to", "float", "type_as", "unsqueeze", "squeeze", "view", "reshape", "expand",
         "stack", "cat", "transpose", "permute", "contiguous", "getitem", "softmax"}  # fmt: skip
_SIZES = {"expand", "view", "reshape", "repeat", "broadcast_to", "unflatten", "ones", "zeros", "empty", "new_ones", "new_zeros",
          "new_empty", "eye"}  # fmt: skip
_FILLS = {"masked_fill", "fill", "full", "full_like", "new_full", "where", "tensor", "scalar_tensor"}
_POWERS = {"lshift", "rshift", "bitwise_left_shift", "bitwise_right_shift", "pow", "ilshift", "irshift", "ipow"}


def scaled_number(node: fx.Node, value: Any) -> int | None:
    """The absolute value of a direct argument of `node` that is scaled on probes; None if it is not scaled."""
    if not _is_large(value) or value != int(value) or op_name(node) not in _SCALED or _is_harmless(node, value):
        return None
    return abs(int(value))


def scaled_numbers(nodes: list[fx.Node]) -> list[int]:
    """The scaled numbers of all nodes, sorted."""
    arguments = ((node, value) for node in nodes for value in (*node.args, *node.kwargs.values()))
    return sorted({size for node, value in arguments if (size := scaled_number(node, value)) is not None})


def hidden_numbers(nodes: list[fx.Node], owned: dict[fx.Node, Tensor], shown: int = LARGEST_SHOWN) -> list[str]:
    """Words for each large number that no probe can show: in an unknown operation, nested, fractional, or in a small tensor.

    Args:
        shown: factors down to 1 / shown are visible on the probes, provided that their products are only added.
    """
    found, among = [], set(nodes)
    for node in nodes:
        for value in owned[node].flatten().tolist() if node in owned and owned[node].numel() <= SMALL_TENSOR else ():
            if _is_large(value) and not value <= HIDES:
                found.append(f"{value:g} in the tensor {node.name}")
        direct = [*node.args, *node.kwargs.values()]
        for value in numbers_in(direct):
            is_scaled = any(value is d for d in direct) and scaled_number(node, value) is not None
            is_power = op_name(node) in _POWERS and abs(value) > 4
            is_reciprocal = type(value) is float and 1 / NO_LIMIT < abs(value) < 1 / LARGEST_SHOWN
            is_reciprocal = is_reciprocal and not (abs(value) >= 1 / shown and _is_added(node, among))
            if is_power or is_reciprocal or (_is_large(value) and not is_scaled and not _is_harmless(node, value)):
                found.append(f"{value:g} in {op_name(node)}")
    return list(dict.fromkeys(found))


def _is_added(factor: fx.Node, among: set[fx.Node]) -> bool:
    """Whether a product reaches the scores through sums and copies only, with no comparison, rounding or bound on the way.

    A tensor of factors (such as written-out ALiBi slopes) may be multiplied once first.
    """
    if op_name(factor) not in _FACTORS:
        return False
    pending = [(factor, op_name(factor) in _TENSORS)]
    seen = set(pending)
    while pending:
        node, is_factor = pending.pop()
        for user in node.users.keys() & among:
            multiplies = is_factor and op_name(user) in ("mul", "multiply")
            if op_name(user) not in _SUMS and not multiplies and not _bounds_hidden(user):
                return False
            reached = user, is_factor and not multiplies
            if reached not in seen:
                seen.add(reached)
                pending.append(reached)
    return True


def _bounds_hidden(node: fx.Node) -> bool:
    """Whether it only raises -inf to a value that still hides: `torch.max(scores, torch.tensor(finfo.min))`."""
    if op_name(node) not in ("max", "maximum") or len(node.args) != 2 or node.kwargs:
        return False
    bound = node.args[1]
    return isinstance(bound, fx.Node) and op_name(bound) in _TENSORS and type(bound.args[0]) is float and bound.args[0] <= -NO_LIMIT


def is_size(node: fx.Node) -> bool:
    """Whether a node's literals are the sizes of its result."""
    return op_name(node) in _SIZES


def _is_large(value: Any) -> bool:
    return type(value) in (int, float) and LARGEST_SHOWN < abs(value) < NO_LIMIT


def _is_harmless(node: fx.Node, value: int | float) -> bool:
    """Whether it is a tensor's size, or the value with which an additive mask hides (`(1 - mask) * -10000.0`)."""
    name = op_name(node)
    if is_size(node):
        return True
    if name == "arange":
        return len(node.args) == 1 or bool(node.args[0] == 0)
    if name in ("full", "new_full") and value in numbers_in(node.args[:2] if name == "new_full" else node.args[:1]):
        return True
    if name in ("mul", "imul", "multiply"):
        return type(value) is float and abs(value) >= -HIDES
    return name in _FILLS and value <= HIDES and (type(value) is float or name in ("masked_fill", "fill"))


def numbers_in(values: Any) -> Iterator[int | float]:
    """The numbers of a node's arguments, also within their lists and slices."""
    if type(values) in (int, float):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from numbers_in(value)
    elif isinstance(values, slice):
        yield from numbers_in((values.start, values.stop, values.step))
