"""Launches a Triton kernel without specializing its arguments again.

`kernel[grid](...)` looks at every argument on every call to find the compiled variant: tens of microseconds for 40 arguments. Here the
caller names the variant by a key, and after the first call the compiled kernel gets addresses and numbers straight away.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from paged_attn.backends.compiling.compile_ahead import is_compiling_ahead, launch

Argument = Tensor | int | float
_ONE = (1, 1, 1)
_OPTIONS = ("num_warps", "num_stages")


class FastKernel:
    """Wraps a @triton.jit function.

    A call's key must contain everything that Triton specialises on and that may differ between calls: constants, options, dtypes, and
    whether integers are 1 or multiples of 16. (Whether addresses are multiples of 16 is checked here.)
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, tuple[CompiledKernel, tuple[Any, ...]]] = {}

    def __call__(
        self, key: Hashable, grid: tuple[int, ...], arguments: tuple[Argument, ...], constants: dict[str, Any], options: dict[str, Any],
        device: int,
    ) -> None:  # fmt: skip
        """A grid of two or three dimensions; arguments in the kernel's order; constants, the kernel's last parameters, by name; `device` is
        the CUDA device's index."""
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
        compiled.run(*grid, *_ONE[len(grid) :], stream, compiled.function, compiled.packed_metadata, None, None, None, *plain, *values)

    def _launch(self, grid: tuple[int, ...], arguments: tuple[Argument, ...], constants: dict[str, Any], options: dict[str, Any]) -> Any:
        taken = {name: value for name, value in options.items() if value or name != "launch_pdl"}  # unknown to ROCm's compiler
        return launch(self.kernel, grid, *arguments, **constants, **taken)


def keyed_launch(kernel: Any, grid: tuple[int, ...], *arguments: Argument, **constants: Any) -> None:
    """`kernel[grid](*arguments, **constants)`, with a key of everything that Triton may specialise on: dtypes, and every number that the
    kernel does not exempt from it. For kernels whose other numbers take few values, such as strides. The first argument is a tensor."""
    assert isinstance(arguments[0], Tensor)
    fast, exempt = _fast_kernel(kernel)
    options = {name: constants.pop(name) for name in _OPTIONS if name in constants}
    told = [each.dtype if isinstance(each, Tensor) else each for index, each in enumerate(arguments) if index not in exempt]
    key = (*told, *constants.values(), *options.values())
    fast(key, grid, arguments, constants, options, device_index(arguments[0].device))


@cache
def _fast_kernel(kernel: Any) -> tuple[FastKernel, frozenset[int]]:
    """And the indices of arguments by whose values it is never specialised; the interpreter specialises by none."""
    parameters = kernel.params if isinstance(kernel, JITFunction) else ()
    return FastKernel(kernel), frozenset(index for index, parameter in enumerate(parameters) if parameter.do_not_specialize)


def device_index(device: torch.device) -> int:
    """The index of a CUDA device, the current one if it has none; -1 on the CPU, where the interpreter runs."""
    if device.type != "cuda":
        return -1
    return device.index if device.index is not None else torch.cuda.current_device()
