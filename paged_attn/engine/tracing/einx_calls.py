"""Makes einx's elementwise operations (`einx.subtract("j, i -> i j", a, b)`) traceable.

einx compiles a function for the sizes of a call and tells Dynamo not to look inside, which fails with a symbolic number of tokens.
Inside `any_length` PyTorch computes these operations, with axes lined up by their names. Patterns with more in them (brackets; axes in
parentheses, except in a call's result) still go to einx. Notation: https://einx.readthedocs.io.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.replaced_entries import replaced_entries

_OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv, "true_divide": operator.truediv,
    "less": operator.lt, "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge, "equal": operator.eq,
    "not_equal": operator.ne, "maximum": torch.maximum, "minimum": torch.minimum, "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
}  # fmt: skip


@contextmanager
def any_length() -> Iterator[None]:
    """Inside, einx's operations on elements take any number of tokens; nothing happens where einx is not imported."""
    einx = sys.modules.get("einx")
    names = [] if einx is None else [name for name in [*_OF_TWO, "where"] if hasattr(einx, name)]
    ours = {name: _by_names(_OF_TWO.get(name), getattr(einx, name)) for name in names}
    with replaced_entries({} if einx is None else vars(einx), ours):
        yield


def _by_names(of_two: Callable[[Any, Any], Any] | None, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for an operation of einx, of two values or, with None, `where`."""

    def call(pattern: str, *tensors: Any, **settings: Any) -> Any:
        axes = _axes(pattern, tensors)
        if axes is None or settings:
            return theirs(pattern, *tensors, **settings)
        inputs, output = axes
        values = [_lined_up(value, names, output) for value, names in zip(tensors, inputs, strict=True)]
        result = torch.where(*values) if of_two is None else functools.reduce(of_two, values)
        return _joined(result, output)

    return call


def _axes(pattern: str, tensors: tuple[Any, ...]) -> tuple[list[list[str]], list[list[str]]] | None:
    """The names of each tensor's axes, and groups of names that are the output's axes; None for what is left to einx."""
    left, arrow, right = pattern.partition("->")
    if any(sign in left for sign in "[](){}") or any(sign in right for sign in "[]{},"):
        return None
    inputs = [part.split() for part in left.split(",")]
    if len(inputs) != len(tensors):
        return None
    dims = [value.ndim if isinstance(value, Tensor) else 0 for value in tensors]
    dots = {dim - len(names) + 1 for dim, names in zip(dims, inputs, strict=True) if "..." in names}
    if len(dots) > 1:
        return None
    many = [f"...{index}" for index in range(dots.pop() if dots else 0)]
    inputs = [_without_dots(names, many) for names in inputs]
    if dims != list(map(len, inputs)) or any(len(set(names)) < len(names) or any(map(str.isdigit, names)) for names in inputs):
        return None  # einx refuses these: a diagonal, or a size
    if arrow:
        output = _groups(right, many)
    else:
        whole = [names for names in inputs if {name for each in inputs for name in each} == set(names)]
        if not whole or any(names != whole[0] for names in whole):
            return None
        output = [[name] for name in whole[0]]
    given = [name for group in output for name in group if name != "1"]
    same = set(given) == {name for names in inputs for name in names} and len(set(given)) == len(given)
    return (inputs, output) if same else None


def _without_dots(names: list[str], many: list[str]) -> list[str]:
    return [each for name in names for each in (many if name == "..." else [name])]


def _groups(right: str, many: list[str]) -> list[list[str]]:
    """`(b s) n ...` as [["b", "s"], ["n"], ["...0"], ["...1"]]."""
    groups: list[list[str]] = []
    inside = False
    for word in right.replace("(", " ( ").replace(")", " ) ").split():
        if word in "()":
            inside = word == "("
            groups += [[]] if inside else []
        elif inside:
            groups[-1] += _without_dots([word], many)
        else:
            groups += [[name] for name in _without_dots([word], many)]
    return groups


def _lined_up(value: Any, names: list[str], output: list[list[str]]) -> Any:
    """`value` with an axis for each name of the output, of size 1 where it lacks it."""
    if not isinstance(value, Tensor):
        return value
    order = [name for group in output for name in group]
    value = value.permute([names.index(name) for name in order if name in names])
    for dim, name in enumerate(order):
        if name not in names:
            value = value.unsqueeze(dim)
    return value


def _joined(result: Tensor, output: list[list[str]]) -> Tensor:
    for dim, group in enumerate(output):
        if len(group) > 1:
            result = result.flatten(dim, dim + len(group) - 1)
    return result
