"""Inductor's processes build launchers, of the kernels that Inductor does not launch itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import fx
from torch._inductor import async_compile
from torch._inductor.runtime import compile_tasks
from torch._inductor.runtime.triton_heuristics import TritonCompileResult

from paged_attn.attn_ops.triton_launchers import writes_launchers
from paged_attn.capture.compiled_pieces import pieces
from paged_attn.capture.inductor import launchers

theirs = async_compile._worker_compile_triton


def made(backend: str, kind: type = TritonCompileResult) -> Any:
    result = kind.__new__(kind)
    result.kernel = SimpleNamespace(src=backend, metadata=SimpleNamespace(target=SimpleNamespace(backend=backend)))
    return result


def test_only_where_triton_launches_an_nvidia_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    kernel = SimpleNamespace(compile_results=[made("cuda"), made("cuda", type("Static", (), {})), made("hip")])
    asked: list[Any] = []
    built: list[Any] = []
    monkeypatch.setattr(compile_tasks, "_worker_compile_triton", lambda *arguments: (asked.extend(arguments), (kernel, 7))[1])
    monkeypatch.setattr(driver, "CudaLauncher", lambda src, metadata: built.append((src, metadata)))
    assert launchers.compile_with_launchers(1, 2, 3) == (kernel, 7)
    assert asked == [1, 2, 3] and built == [("cuda", kernel.compile_results[0].kernel.metadata)]


@pytest.mark.parametrize("writes", [True, False])
def test_pieces_are_compiled_so_where_triton_writes_launchers(writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(launchers, "writes_launchers", lambda: writes)
    monkeypatch.setattr("torch._inductor.standalone_compile", lambda *_, **__: seen.append(async_compile._worker_compile_triton))
    pieces.inductor(fx.GraphModule({}, fx.Graph()), [])
    assert seen == [launchers.compile_with_launchers if writes else theirs] and async_compile._worker_compile_triton is theirs


def test_triton_from_3_7_on_writes_none() -> None:
    triton = pytest.importorskip("triton")
    assert writes_launchers() == (tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))
