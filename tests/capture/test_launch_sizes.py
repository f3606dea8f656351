"""Inductor chooses blocks for many rows where it traced few, and nothing else of what it knows changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.sizevars import SizeVarAllocator
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from paged_attn.capture.inductor.launch_sizes import ROWS, blocks_for_many_rows
from tests.capture.gpu_code import kernels_for_gpu

HINT = next(name for name in ("symbolic_hint", "optimization_hint") if hasattr(SizeVarAllocator, name))


class Traced:
    """A tensor of symbolic rows of 64, and what Inductor would know of its sizes."""

    def __init__(self, rows: int) -> None:
        self.environment = ShapeEnv()
        self.rows = self.environment.create_symbol(rows, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        self.sizes = SizeVarAllocator(self.environment)

    def hint(self) -> int:
        return int(getattr(self.sizes, HINT)(self.rows * 64))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The hints that kernels found when they were written; a kernel here is a `Traced`."""
    hints: list[int] = []
    monkeypatch.setattr(TritonKernel, "codegen_kernel", lambda kernel, name=None: hints.append(kernel.hint()))
    return hints


def write(traced: Traced) -> None:
    TritonKernel.codegen_kernel(traced)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "expected"), [(6, ROWS), (ROWS - 1, ROWS), (ROWS, ROWS), (5000, 5000)])
def test_few_rows_count_as_many_while_a_kernel_is_written(rows: int, expected: int, written: list[int]) -> None:
    traced = Traced(rows)
    write(traced)
    with blocks_for_many_rows():
        assert traced.hint() == rows * 64, "what is no kernel's text keeps to the sizes that were seen"
        write(traced)
    write(traced)
    assert written == [rows * 64, expected * 64, rows * 64]


def test_no_guard_comes_of_it(written: list[int]) -> None:
    traced = Traced(6)
    seen, guards = dict(traced.environment.backed_var_to_val), len(traced.environment.guards)
    with blocks_for_many_rows():
        write(traced)
    assert traced.environment.backed_var_to_val == seen and len(traced.environment.guards) == guards
    assert traced.sizes.backed_var_to_val is traced.environment.backed_var_to_val


def test_an_error_leaves_inductor_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(kernel: Any, name: str | None = None) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(TritonKernel, "codegen_kernel", fails)
    hint = getattr(SizeVarAllocator, HINT)
    with pytest.raises(ZeroDivisionError), blocks_for_many_rows():
        write(Traced(6))
    assert TritonKernel.codegen_kernel is fails and getattr(SizeVarAllocator, HINT) is hint and config.post_grad_custom_post_pass is None


def test_a_few_long_rows_are_reduced_by_one_kernel() -> None:
    """As many are; Inductor alone lets several programs share each of a few rows of 16,384, and a second kernel join their parts."""

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    def kernels() -> int:
        return kernels_for_gpu(normed, (6, 16384)).count("@triton_heuristics.")

    before = kernels()
    with blocks_for_many_rows():
        assert kernels() == 1 < before
