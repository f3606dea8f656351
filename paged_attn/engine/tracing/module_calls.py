"""Runs a model on inputs of two lengths and records each call of some of its modules; tells whether a module that is an op is running."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

LENGTHS = (5, 8)  # tokens of the watched calls
ModuleCall = Callable[[nn.Module, Sequence[Tensor]], Any]
Seen = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


def watch_calls(model: nn.Module, modules: Collection[nn.Module], inputs: Callable[[int], dict[str, Any]], seen: Seen) -> None:
    """`seen` is told of every call: how many tokens the model was given, the module, its arguments by position and by name, its output.

    Args:
        inputs: those of a call of the model on so many tokens, without a cache.
    """
    for length in LENGTHS:
        with ExitStack() as undo, torch.no_grad():
            for module in modules:
                undo.callback(module.register_forward_hook(functools.partial(seen, length), with_kwargs=True).remove)
            model(**inputs(length))


def with_running_flag(call: ModuleCall) -> tuple[ModuleCall, list[bool]]:
    """The call, and a list whose only item is true while it runs. A graph that is being made runs its ops, and a forward that emits such an
    op must not emit it again then."""
    running = [False]

    def run(module: nn.Module, given: Sequence[Tensor]) -> Any:
        running[0] = True
        try:
            return call(module, given)
        finally:
            running[0] = False

    return run, running
