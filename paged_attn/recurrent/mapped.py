"""`torch.func.vmap` that also works inside an op: while a step is recorded, the dispatcher skips it there and would run the op's own parts
on tensors that no kernel knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_KEYS = [
    getattr(torch._C.DispatchKey, name)
    for name in ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchBatched", "FuncTorchVmapMode")
]


def mapped(function: Callable[..., Any], *args: Any) -> Any:
    """`torch.func.vmap(function)(*args)`."""
    skipped = torch._C._dispatch_tls_local_exclude_set()
    for key in _KEYS:
        skipped = skipped.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), skipped):
        return torch.func.vmap(function)(*args)
