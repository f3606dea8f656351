"""Lets Inductor's Triton kernels start before the previous kernel has ended, so that launch latency overlaps with its work.

Inductor can do this itself (`triton.enable_pdl`), but then each kernel waits only at the first load that needs it. A kernel without such a
load never waits, and whatever follows it may overtake what came before it. Here every kernel first waits and then lets the next one start.
So when a kernel starts, all kernels except the one before it have ended and their results can be read; after its wait, that one's too.
Kernels from elsewhere that start early can rely on this (`paged_attn::linear` loads its weights before it waits).
(CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; compute capability 9.0 and later.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from paged_attn.capture.inductor.cache_mark import marked


@contextlib.contextmanager
def pdl(wanted: bool) -> Iterator[None]:
    """Inside, if `wanted`, Inductor compiles kernels that start early on GPUs that can do so."""
    from torch._inductor import config

    with config.patch({"triton.enable_pdl": True}) if wanted else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def waiting_first() -> Iterator[None]:
    """Inside, kernels that Inductor writes and that start early, whatever enabled it, wait before they do anything else."""
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel

    if not config.triton.enable_pdl:
        yield
        return
    with marked("kernels wait first"), patch.object(TritonKernel, "_filter_pdl", _wait_first):
        yield


def _wait_first(kernel: Any, code: Any) -> None:
    """Replaces Inductor's method that drops superfluous waits from a kernel's body (an IndentedBuffer)."""
    mine = (kernel.GDC_WAIT, kernel.GDC_LAUNCH)
    lines = [line for line in code._lines if not (isinstance(line, str) and line.strip() in mine)]
    code._lines = [*mine, *lines] if kernel._enable_pdl_codegen() else lines
