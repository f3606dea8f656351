"""Kernels launched by a key that is made of their arguments: a variant is compiled once, and never taken for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from paged_attn.backends import fast_launch
from paged_attn.backends.fast_launch import keyed_launch


def store_numbers(x, tokens, stride, scale, BLOCK: tl.constexpr):
    """Never run."""


class Compiled(CompiledKernel):
    """Counts its runs."""

    def __init__(self, runs: list[Any]) -> None:
        self.runs, self.function, self.packed_metadata = runs, None, None

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)

    def run(self, *given: Any) -> None:
        self.runs.append(given)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """Launches through Triton, and those of kernels that it compiled before."""
    compiled, runs = list[Any](), list[Any]()

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> Compiled:
        compiled.append((grid, arguments, constants))
        return Compiled(runs)

    monkeypatch.setattr(fast_launch, "launch", launch)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return compiled, runs


def test_a_known_variant_gets_addresses_and_numbers_and_a_whole_grid(launched: tuple[list[Any], list[Any]]) -> None:
    (compiled, runs), kernel, x = launched, JITFunction(store_numbers, do_not_specialize=["tokens"]), torch.zeros(4)
    for grid, tokens in (((2, 3), 5), ((4, 5, 6), 16), ((1, 1), 1)):
        keyed_launch(kernel, grid, x, tokens, 8, 0.5, BLOCK=32, num_warps=8)
    assert compiled == [((2, 3), (x, 5, 8, 0.5), {"BLOCK": 32, "num_warps": 8})]
    assert [(*run[:4], *run[-5:]) for run in runs] == [
        (4, 5, 6, 7, x.data_ptr(), 16, 8, 0.5, 32), (1, 1, 1, 7, x.data_ptr(), 1, 8, 0.5, 32),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(4, dtype=torch.bfloat16)},
        {"x": torch.zeros(5)[1:]},
        {"stride": 16},
        {"stride": 1},
        {"BLOCK": 64},
        {"num_warps": 4},
    ],
)
def test_another_variant_is_compiled(other: dict[str, Any], launched: tuple[list[Any], list[Any]]) -> None:
    (compiled, runs), kernel = launched, JITFunction(store_numbers, do_not_specialize=["tokens"])
    for given in ({}, other):
        told = {"x": torch.zeros(4), "stride": 8, "BLOCK": 32, "num_warps": 8} | given
        x, stride = told.pop("x"), told.pop("stride")
        for _ in range(2):
            keyed_launch(kernel, (1, 1), x, 5, stride, 0.5, **told)
    assert len(compiled) == len(runs) == 2
