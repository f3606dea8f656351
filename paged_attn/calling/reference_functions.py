"""Replaces an installed package's functions by transformers' own PyTorch ones while numbers are compared.

With flash-linear-attention, causal-conv1d or mamba-ssm installed, transformers' layers call those kernels, whose two forms differ by more
than rounding: fla 0.6's gated delta rule in float32 on an H100 by 4 % of some rows. What a layer computes is told by the PyTorch function.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_HUB = "transformers.integrations.hub_kernels"  # its decorator picks a package's function and keeps the other as __wrapped__
_lock = threading.Lock()
_replaced: dict[tuple[int, str], list[Any]] = {}  # by (globals id, name): the package's function, and how many callers replace it


@contextmanager
def reference_functions(model: nn.Module) -> Iterator[None]:
    """Inside, the modules of the model call transformers' functions; other threads that run the same classes do, too."""
    taken = [(scope, name) for scope in forward_scopes([model]) for name in _names(scope)]
    with _lock:
        for scope, name in taken:
            entry = _replaced.setdefault((id(scope), name), [scope[name], 0])
            entry[1] += 1
            scope[name] = entry[0].__wrapped__
    try:
        yield
    finally:
        with _lock:
            for scope, name in taken:
                entry = _replaced[id(scope), name]
                entry[1] -= 1
                if not entry[1]:
                    scope[name] = _replaced.pop((id(scope), name))[0]


def _names(scope: dict[str, Any]) -> list[str]:
    return [name for name, value in list(scope.items()) if (id(scope), name) in _replaced or _is_of_a_package(value)]


def _is_of_a_package(value: object) -> bool:
    if not inspect.isfunction(value) or value.__globals__.get("__name__") != _HUB or not hasattr(value, "__wrapped__"):
        return False
    return bool(inspect.getclosurevars(value).nonlocals.get("is_new_implementation", True))


def forward_scopes(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The globals of the forwards of these modules and of those inside them, each once."""
    kinds = dict.fromkeys(type(part) for module in modules for part in module.modules())
    forwards = [inspect.unwrap(kind.forward) for kind in kinds if hasattr(kind, "forward")]  # those of torch.jit.script have none
    return list({id(each.__globals__): each.__globals__ for each in forwards if inspect.isfunction(each)}.values())
