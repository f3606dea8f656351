"""Processes that compile kernels for an engine; they should be started before weights are read."""

from __future__ import annotations

import torch

from paged_attn.backends.devices import default_device, has_triton
from paged_attn.capture.inductor import triton_cache as inductor
from paged_attn.engine.config import EngineConfig


def start_compilers(device: torch.device | str | None, config: EngineConfig) -> None:
    """Ours and Inductor's, if this engine will compile: they take some five seconds to begin. No harm in asking twice. `device`: None is
    `default_device()`."""
    device = default_device() if device is None else torch.device(device)
    if not config.compile or device.type != "cuda" or not torch.cuda.is_available() or not has_triton():
        return
    from paged_attn.backends.compiling.compile_ahead import start_workers

    inductor.pin_triton_cache()  # first: they begin with this process's environment
    start_workers()
    if config.inductor is not False:
        inductor.start_workers()
