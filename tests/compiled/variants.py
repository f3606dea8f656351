"""Which variants of our kernels an engine asks for ahead, and which it launches, in Triton's interpreter on a CPU.

`with variants() as found: ...` makes the CPU look like a GPU to what compiles ahead.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from paged_attn.backends.attention.triton.backend import TritonBackend
from paged_attn.backends.compiling import compile_ahead
from paged_attn.backends.devices import device_word
from paged_attn.backends.experts.triton.backend import TritonExpertsBackend
from paged_attn.backends.fast_launch import FastKernel
from paged_attn.backends.scans.triton.backend import TritonScans
from paged_attn.compiled import rewritten_graph
from paged_attn.compiled.steps_ahead import compile_steps_ahead
from paged_attn.recurrent.as_ops import by_ops

CPU = torch.device("cpu")
LAUNCHING = ("scans.triton.conv", "scans.triton.net", "scans.triton.steps", "experts.triton.few", "experts.triton.grouped")
HERE = frozenset({device_word(CPU)})


@dataclass
class Variants:
    """By kernel; `launched` with the number of launches."""

    asked: set[Hashable] = field(default_factory=set)
    launched: dict[Hashable, int] = field(default_factory=dict)

    @property
    def missing(self) -> dict[str, int]:
        """How often variants were launched that nobody had asked for, by the kernel's name."""
        found: dict[str, int] = {}
        for variant, count in self.launched.items():
            if variant not in self.asked:
                name = str(variant[0])  # type: ignore[index]
                found[name] = found.get(name, 0) + count
        return found

    def note(self, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        plain = _not_specialised(kernel.fn)
        told = tuple(_told(each, name in plain) for name, each in zip(kernel.arg_names, arguments, strict=False))
        variant = kernel.__name__, told, tuple(sorted(constants.items()))
        if compile_ahead.is_compiling_ahead():
            self.asked.add(variant)
        else:
            self.launched[variant] = self.launched.get(variant, 0) + 1


def _told(argument: Any, never: bool) -> Hashable:
    """With whether a tensor begins at a multiple of 16 bytes, as all that is compiled ahead does."""
    told = compile_ahead._specialised(argument, never)
    if not isinstance(argument, torch.Tensor):
        return told
    is_fake = isinstance(argument, FakeTensor)
    return told, (argument.storage_offset() * argument.itemsize if is_fake else argument.data_ptr()) % 16 == 0


@cache
def _not_specialised(function: Any) -> tuple[str, ...]:
    """The interpreter's kernels do not know it."""
    found = re.search(r"do_not_specialize=(\[.*?\])", inspect.getsource(function).split("def ")[0], re.DOTALL)
    return tuple(eval(found[1], function.__globals__)) if found else ()


@contextmanager
def variants() -> Iterator[Variants]:
    found = Variants()
    call = FastKernel.__call__

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        found.note(kernel, arguments, constants)
        if not compile_ahead.is_compiling_ahead():
            kernel[grid](*arguments, **constants)

    def fast(self: FastKernel, key: Any, grid: Any, arguments: Any, constants: Any, options: Any, device: int) -> None:
        found.note(self.kernel, arguments, constants | options)
        if not compile_ahead.is_compiling_ahead():
            call(self, key, grid, arguments, constants, options, device)

    def on_cpu(graph: Any, layers: Any, dtype: Any, device: Any, runs_with: Any) -> None:
        compile_steps_ahead(graph, layers, dtype, CPU, runs_with)

    with ExitStack() as patched:
        for name in LAUNCHING:
            patched.enter_context(patch.object(import_module(f"paged_attn.backends.{name}"), "launch", launch))
        patched.enter_context(patch.object(FastKernel, "__call__", fast))
        patched.enter_context(patch.object(TritonBackend, "capabilities", replace(TritonBackend.capabilities, devices=HERE)))
        for kind in (TritonScans, TritonExpertsBackend):
            patched.enter_context(patch.object(kind, "needs", replace(kind.needs, devices=HERE)))  # type: ignore[attr-defined]
        patched.enter_context(patch.object(by_ops, "_compiles_ahead", lambda layer: True))
        patched.enter_context(patch.object(rewritten_graph, "has_triton", lambda: True))
        patched.enter_context(patch.object(rewritten_graph, "model_device", lambda model: torch.device("cuda")))
        patched.enter_context(patch.object(rewritten_graph, "compile_steps_ahead", on_cpu))
        patched.enter_context(patch("paged_attn.engine.runners.make_runner.serves_latents", lambda *_: True))
        yield found
