"""Buffers as plain tensors while a model is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def plain_buffers(model: nn.Module) -> Iterator[None]:
    """Within the block, buffers made with `torch.nn.Buffer` are ordinary tensors of the same memory; afterwards they are themselves again.

    Dynamo (2.13) can not trace a forward that assigns such a buffer to its own name (`self.table = self.table.to(x.device)`).
    """
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    replaced = [entry for entry in buffers if getattr(entry[2], "_is_buffer", False)]
    for module, name, buffer in replaced:
        assert buffer is not None
        module._buffers[name] = buffer.detach()
    try:
        yield
    finally:
        for module, name, buffer in replaced:
            module._buffers[name] = buffer
