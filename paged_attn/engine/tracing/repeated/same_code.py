"""Proves that the trace of one layer is also that of another: everything that Dynamo read from the one is the same in the other.

Dynamo records each attribute, class, function and number that a trace depends on, as a guard with the expression that leads to it. The
expression is evaluated for both layers.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.engine.tracing.repeated.find import form_of, numbers_of_ops

Guards = Iterable[tuple[str, str]]
# From a layer through the forward that `marked` gave it, which keeps the layer's own: how Dynamo may come to anything of the layer.
THROUGH_MARKS = r"\.forward\.__closure__\[\d+\]\.cell_contents\.__self__"
ABSENT = object()


class NotAlike(Exception):
    """Layers that seemed alike are not."""


def guards_of_trace() -> list[tuple[str, str]]:
    """(expression, kind) of each guard of the trace that runs in this thread."""
    context = torch._guards.TracingContext.get()
    guards = context.guards_context.dynamo_guards
    return [(guard.name if isinstance(guard.name, str) else guard.name(), guard.create_fn_name()) for guard in guards]


def expression_of(name: str) -> str:
    """How guards call a module of the model, by its name in `named_modules()`."""
    return "L['model']" + "".join(f"._modules['{part}']" for part in name.split("."))


def check_same_code(model: nn.Module, guards: Guards, traced: str, others: Iterable[str]) -> None:
    """Raises NotAlike: the trace of the layer `traced` depends on something that is otherwise in one of the others."""
    start = expression_of(traced)
    of_layer = [(re.sub(f"^{re.escape(start)}{THROUGH_MARKS}", start, text), kind) for text, kind in guards if text.startswith(start)]
    read = [(text, kind) for text, kind in of_layer if not text.startswith(f"{start}.forward")]  # what is left there is the marks' own
    if not read:
        raise NotAlike(f"nothing is known of what a trace reads of {traced}")
    values = [(text, kind, _value(text, kind, model)) for text, kind in read]
    for other in others:
        instead, numbers = expression_of(other), numbers_instead(model, traced, other)
        for text, kind, value in values:
            there = _value(text.replace(start, instead), kind, model)
            is_number = "__closure__" in text and type(value) is int and numbers.get(value) == there
            if not is_number and not _alike(value, there):
                raise NotAlike(f"{traced} and {other} differ in {text.removeprefix(start)} ({kind})")


def numbers_instead(model: nn.Module, one: str, other: str) -> dict[int, int]:
    """For each number under which the ops know a module of the layer `one`, that of the layer `other`."""
    here, there = (numbers_of_ops(model.get_submodule(name)) for name in (one, other))
    found = dict(zip(here, there, strict=True))
    if len(found) < len(here):
        raise NotAlike(f"modules of {one} are known to ops under one number")
    return found


def _value(expression: str, kind: str, model: nn.Module) -> Any:
    """What a guard's expression leads to; ABSENT, where Dynamo noted that nothing is there."""
    holder, _, name = expression.rpartition(".")
    try:
        if kind == "HASATTR" and name.isidentifier():
            return getattr(eval(holder, {"L": {"model": model}}), name, ABSENT)
        return eval(expression, {"L": {"model": model}})
    except (AttributeError, LookupError, NameError, TypeError) as error:
        raise NotAlike(f"{expression} leads nowhere: {error}") from error


def _alike(one: Any, other: Any) -> bool:
    """Whether code that is given one of two values goes the same way; what is inside of them has guards of its own."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return bool(form_of(one) == form_of(other))
    if isinstance(one, nn.Module):
        return bool(vars(one).keys() - {"forward"} == vars(other).keys() - {"forward"})
    if isinstance(one, dict):
        return list(one) == list(other)
    if isinstance(one, list | tuple | set):
        return len(one) == len(other)
    if isinstance(one, types.FunctionType):
        return one.__code__ is other.__code__
    if isinstance(one, types.MethodType):
        return _alike(one.__func__, other.__func__)
    if isinstance(one, types.CellType):
        return _alike(one.cell_contents, other.cell_contents)
    if isinstance(one, functools.partial):
        return bool((one.func, one.args, one.keywords) == (other.func, other.args, other.keywords))
    return bool(one == other)
