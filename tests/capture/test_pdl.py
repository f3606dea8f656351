"""Kernels that start early wait before they do anything else, whoever switched early starts on, and only inside the block."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.utils import IndentedBuffer

from paged_attn.capture.compiled_pieces import pieces
from paged_attn.capture.compiled_pieces.artifact_key import settings_text
from paged_attn.capture.inductor.pdl import pdl, waiting_first

WAIT, LAUNCH = TritonKernel.GDC_WAIT, TritonKernel.GDC_LAUNCH
theirs = TritonKernel._filter_pdl


class Kernel:
    """What `_filter_pdl` looks at of a kernel."""

    GDC_WAIT, GDC_LAUNCH = WAIT, LAUNCH

    def __init__(self, early: bool) -> None:
        self._enable_pdl_codegen = lambda: early


def body(*lines: str) -> IndentedBuffer:
    code = IndentedBuffer()
    for line in lines:
        code.writeline(line)
    return code


def filtered(code: IndentedBuffer, early: bool = True, times: int = 1) -> list[str]:
    with pdl(True), waiting_first():
        for _ in range(times):  # Inductor may write one body out twice
            TritonKernel._filter_pdl(Kernel(early), code)  # type: ignore[arg-type]
    return code.getvalue().splitlines()


def test_a_kernel_waits_before_it_loads() -> None:
    code = body(
        "xindex = tl.program_id(0)",
        "a = tl.load(in_ptr0 + xindex)",
        WAIT,
        "b = tl.load(in_ptr1 + xindex)",
        WAIT,
        LAUNCH,
        "tl.store(out_ptr0 + xindex, a + b)",
    )
    rest = [
        "xindex = tl.program_id(0)",
        "a = tl.load(in_ptr0 + xindex)",
        "b = tl.load(in_ptr1 + xindex)",
        "tl.store(out_ptr0 + xindex, a + b)",
    ]
    assert filtered(code, times=2) == [WAIT, LAUNCH, *rest]


def test_a_kernel_without_loads_waits() -> None:
    """Inductor's own placing writes no wait at all there."""
    plain = body("tl.store(out_ptr0 + 0, 1.0)")
    theirs(Kernel(True), plain)  # type: ignore[arg-type]
    assert WAIT not in plain.getvalue()
    assert filtered(plain) == [WAIT, LAUNCH, "tl.store(out_ptr0 + 0, 1.0)"]


def test_a_kernel_that_can_not_start_early_has_no_wait() -> None:
    assert filtered(body("a = tl.load(in_ptr0)", WAIT, LAUNCH), early=False) == ["a = tl.load(in_ptr0)"]


def test_waits_inside_a_loop_are_dropped_with_their_indentation() -> None:
    code = body("for r0 in range(4):")
    with code.indent():
        code.writeline("a = tl.load(in_ptr0 + r0)")
        code.writeline(WAIT)
    assert filtered(code) == [WAIT, LAUNCH, "for r0 in range(4):", "    a = tl.load(in_ptr0 + r0)"]


def seen_while_compiling(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool, Any]]:
    """What a compile of a piece finds: whether kernels start early, whether they wait first, and what marks Inductor's cache."""
    seen: list[tuple[bool, bool, Any]] = []

    def compiled(*_: Any, **__: Any) -> None:
        seen.append((config.triton.enable_pdl, TritonKernel._filter_pdl is not theirs, config.post_grad_custom_post_pass))

    monkeypatch.setattr(torch._inductor, "standalone_compile", compiled)
    pieces.inductor(fx.GraphModule(torch.nn.Module(), fx.Graph()), [])
    assert TritonKernel._filter_pdl is theirs and config.post_grad_custom_post_pass is None
    return seen


def test_no_kernel_waits_unless_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pdl(False):
        ((early, waits, mark),) = seen_while_compiling(monkeypatch)
    assert not early and not waits and "wait" not in repr(mark.uuid())


def test_pieces_wait_first_and_inductors_cache_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_text()
    with pdl(True):
        ((early, waits, mark),) = seen_while_compiling(monkeypatch)
        assert early and waits and "wait first" in repr(mark.uuid()) and mark(fx.Graph()) is None
        assert settings_text() != before, "pieces on disk would be taken for those that start late"
    assert settings_text() == before and not config.triton.enable_pdl


def test_pieces_wait_first_if_the_user_lets_kernels_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCHINDUCTOR_ENABLE_PDL=1."""
    with config.patch({"triton.enable_pdl": True}):
        ((early, waits, _),) = seen_while_compiling(monkeypatch)
    assert early and waits


def test_an_error_while_compiling_leaves_inductor_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), pdl(True), waiting_first():
        raise ZeroDivisionError
    assert TritonKernel._filter_pdl is theirs and not config.triton.enable_pdl and config.post_grad_custom_post_pass is None


def test_an_engine_is_imported_without_inductor() -> None:
    """It takes a second, which a process that compiles nothing need not wait for."""
    code = "import sys; from paged_attn import LLM; LLM; print([name for name in sys.modules if name.startswith('torch._inductor')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
