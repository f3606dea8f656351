"""Launches a Triton kernel without specializing its arguments again.

`kernel[grid](...)` looks at every argument on every call to find the compiled variant: tens of microseconds for 40 arguments. Here the
caller names the variant by a key, and after the first call the compiled kernel gets addresses and numbers straight away.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from paged_attn.backends.compiling.compile_ahead import is_compiling_ahead, launch

Argument = Tensor | int | float


class FastKernel:
    """Wraps a @triton.jit function.

    A call's key must contain everything that Triton specialises on and that may differ between calls: constants, options, dtypes, and
    whether integers are 1 or multiples of 16. (Whether addresses are multiples of 16 is checked here.)
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, tuple[CompiledKernel, tuple[Any, ...]]] = {}

    def __call__(
        self, key: Hashable, grid: tuple[int, int], arguments: tuple[Argument, ...], constants: dict[str, Any], options: dict[str, Any],
        device: int,
    ) -> None:  # fmt: skip
        """Arguments in the kernel's order; constants, the kernel's last parameters, by name; `device` is the CUDA device's index."""
        if is_compiling_ahead():
            self._launch(grid, arguments, constants, options)
            return
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(key, grid, arguments, constants, options, device)
            return
        plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]  # for a tensor, the launcher would call the driver
        joined = 0
        for argument, number in zip(arguments, plain, strict=True):
            if isinstance(argument, Tensor):
                joined |= number  # type: ignore[operator]
        odd: tuple[int, ...] = ()
        if joined & 15:
            odd = tuple(i for i, a in enumerate(arguments) if isinstance(a, Tensor) and a.data_ptr() & 15)
        known = self._compiled.get(full := (key, device, odd))
        if known is None:
            compiled = self._launch(grid, arguments, constants, options)
            if isinstance(compiled, CompiledKernel):  # not in the interpreter
                self._compiled[full] = compiled, tuple(constants[name] for name in self.kernel.arg_names[len(arguments) :])
            return
        compiled, values = known
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(*grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *plain, *values)

    def _launch(self, grid: tuple[int, int], arguments: tuple[Argument, ...], constants: dict[str, Any], options: dict[str, Any]) -> Any:
        taken = {name: value for name, value in options.items() if value or name != "launch_pdl"}  # unknown to ROCm's compiler
        return launch(self.kernel, grid, *arguments, **constants, **taken)


def device_index(device: torch.device) -> int:
    """The index of a CUDA device, the current one if it has none; -1 on the CPU, where the interpreter runs."""
    if device.type != "cuda":
        return -1
    return device.index if device.index is not None else torch.cuda.current_device()
