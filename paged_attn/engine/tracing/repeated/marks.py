"""Ops that mark the beginning and end of a layer in a trace, or replace the layer. None is ever run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.ops.define import define_op
from paged_attn.calling.left_as_it_was import replaced_forward
from paged_attn.engine.tracing.repeated.find import AlikeLayers

TRACED = 2  # layers traced in each group


def _never(*_: object) -> Tensor:
    raise AssertionError("a mark of a trace is never run")


def _like_the_first(given: Sequence[Tensor], *_: object) -> Tensor:
    return torch.empty_like(given[0])


def _like_it(result: Tensor, layer: int) -> Tensor:
    return torch.empty_like(result)


# given: all tensors that the layer is given; numbers: and all integers; others: what else, in words; returns the first tensor.
BEGIN = define_op("layer_begins(Tensor[] given, SymInt[] numbers, str others, int layer) -> Tensor", _never, _like_the_first)
END = define_op("layer_ends(Tensor result, int layer) -> Tensor", _never, _like_it)
STANDS_FOR = define_op("stands_for_layer(Tensor[] given, SymInt[] numbers, str others, int layer) -> Tensor", _never, _like_the_first)


@contextmanager
def marked(model: nn.Module, groups: Sequence[AlikeLayers]) -> Iterator[dict[str, int]]:
    """Inside, while torch.compile traces, the first two layers of each group are marked and the others are one op each.

    The value: which number a layer has in these ops, by its name.
    """
    numbers: dict[str, int] = {}
    with ExitStack() as undo:
        for group in groups:
            for place, name in enumerate(group.names):
                number = numbers.setdefault(name, len(numbers))
                layer = model.get_submodule(name)
                instead = (_between_marks if place < TRACED else _stand_in)(layer, number, group.results)
                undo.enter_context(replaced_forward(layer, instead))
        yield numbers


def _between_marks(layer: nn.Module, number: int, results: int) -> Callable[..., Any]:
    original = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return original(*args, **kwargs)
        begun = BEGIN(*_sorted(args, kwargs), number)
        result = original(begun, *args[1:], **kwargs) if args else original(**{**kwargs, "hidden_states": begun})
        if not results:
            return END(result, number)
        return (END(result[0], number), *result[1:])

    return forward


def _stand_in(layer: nn.Module, number: int, results: int) -> Callable[..., Any]:
    original = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return original(*args, **kwargs)
        result = STANDS_FOR(*_sorted(args, kwargs), number)
        return (result, *[None] * (results - 1)) if results else result

    return forward


def _sorted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[int], str]:
    """What a call is given: its tensors, its integers, and words for the rest. Raises TypeError: it is given something else.

    One loop: every function that Dynamo goes into takes it milliseconds.
    """
    tensors: list[Tensor] = []
    numbers: list[int] = []
    words: list[str] = list(kwargs)
    pending: list[Any] = [*args, *kwargs.values()]
    while pending:
        value = pending.pop(0)
        if isinstance(value, Tensor):
            words.append("tensor")
            tensors.append(value)
        elif value is None or isinstance(value, bool | float | str):
            words.append(f"{value!r}")
        elif isinstance(value, int):
            words.append("number")
            numbers.append(value)
        elif isinstance(value, tuple | list):
            words.append(f"{len(value)} of")
            pending = [*value, *pending]
        else:
            raise TypeError(f"a layer is given a {type(value).__name__}")
    return tensors, numbers, " ".join(words)
