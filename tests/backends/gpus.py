"""GPUs for which programs compile kernels without having one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget

from paged_attn.backends.compiling.compile_job import Job
from paged_attn.backends.machine import Machine


@dataclass(frozen=True)
class GPU:
    """One that kernels are compiled for.

    Attributes:
        capability: its compute capability, times ten.
        shared_bytes: of shared memory that a program may have there.
    """

    capability: int
    shared_bytes: int

    @property
    def target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    @property
    def machine(self) -> Machine:
        return Machine(
            132, self.capability == 90, early=self.capability >= 90, shared_bytes=self.shared_bytes,
            sm90_or_newer=self.capability >= 90, blackwell=self.capability // 10 == 10,
        )  # fmt: skip


GPUS = {
    "a100": GPU(80, 163 << 10),
    "l4": GPU(89, 99 << 10),  # and an RTX 4090
    "h100": GPU(90, 227 << 10),
    "b200": GPU(100, 227 << 10),
    "rtx5090": GPU(120, 99 << 10),
}


def only_compiled(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> Any:
    """In place of `backends.compiling.compile_ahead.launch`: the compiled kernel, for the GPU that the program is told to compile for."""
    return Job.of(kernel, named().target, grid, arguments, constants).compile()


def named() -> GPU:
    """The one that a program is told to compile for; an H100."""
    return GPUS[sys.argv[1] if len(sys.argv) > 1 else "h100"]
