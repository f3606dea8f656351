"""Models that torch.compile wraps: the model inside, and its calls without Dynamo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

CALL = "_compiled_call_impl"  # attribute where nn.Module keeps the result of compile()


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside what `torch.compile(model)` returned; any other as it is."""
    inner: Any = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


@contextmanager
def without_compiled_calls(model: nn.Module) -> Iterator[None]:
    """Inside, calls of the model and of its parts run as written where `module.compile()` had them go through Dynamo."""
    compiled = [(vars(module), call) for module in model.modules() if (call := vars(module).pop(CALL, None)) is not None]
    try:
        yield
    finally:
        for attributes, call in compiled:
            attributes[CALL] = call
