"""Whether a value may become a slice of a wider tensor: what computes on it must take its strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from paged_attn.passes.graph_tools import bases_of, value_of, writes_in_place

_ANY_STRIDES = ("aten", "prims", "paged_attn")
_PYTORCH = ("torch", "_operator", "builtins", "math")
_PADDING = 64  # elements on either side; a multiple of any alignment


def takes_slices(node: fx.Node) -> bool:
    """Whether `node`'s value [..., n] may be strided: no view of it needs it dense, and no op of others or output gets it.

    A kernel of somebody else's may read it by its address alone.
    """
    value = value_of(node)
    wide = value.new_empty((*value.shape[:-1], value.shape[-1] + 2 * _PADDING))
    try:
        views = values_of_views(node, wide.narrow(-1, _PADDING, value.shape[-1]))
    except (RuntimeError, ValueError):  # view() of something that only a copy can be viewed as
        return False
    return all(_takes_strides(user) for view in (node, *views) for user in view.users)


def values_of_views(node: fx.Node, value: Tensor) -> dict[fx.Node, Any]:
    """The example values of all views of `node`, and of their views, if `node`'s is `value`.

    Raises:
        RuntimeError, ValueError: there is no such view of a tensor with these strides.
    """
    found: dict[fx.Node, Any] = {node: value}
    pending = [node]
    while pending:
        viewed = pending.pop()
        for user in viewed.users:
            if user not in found and user.args and user.args[0] is viewed and viewed in bases_of([user]):
                found[user] = _evaluate(user, found)
                pending.append(user)
    del found[node]
    return found


def _evaluate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    def value(argument: fx.Node) -> Any:
        return known[argument] if argument in known else value_of(argument)

    if writes_in_place(node):
        return value(node.args[0])  # type: ignore[arg-type]
    args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _takes_strides(user: fx.Node) -> bool:
    target = user.target
    if user.op == "call_method":
        return target != "as_strided"
    if user.op != "call_function":
        return False
    if isinstance(target, OpOverload):
        namespace, name = target.name().split("::")
        return namespace in _ANY_STRIDES and not name.startswith("as_strided")
    module = getattr(target, "__module__", None) or "torch"
    return module.split(".")[0] in _PYTORCH and not isinstance(target, HigherOrderOperator) and target is not torch.as_strided
