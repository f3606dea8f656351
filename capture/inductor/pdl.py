"""Lets Inductor's Triton kernels start before the previous kernel has ended, so that launch latency overlaps with its work.

Inductor can do so itself (`triton.enable_pdl`), but lets each kernel wait where it finds a load that needs it. A kernel without such a load
waits for nothing, and whatever comes after it may overtake what came before it. Here every kernel waits first of all, and only then lets
the next one start; so when a kernel starts, all but the one in front have ended and can be read, and after its wait that one, too. Kernels
of other makers that start early can count on it (`paged_attn::linear` asks for its weights before it waits).
(CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; compute capability 9.0 on.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from paged_attn.capture.inductor.cache_mark import marked


@contextlib.contextmanager
def pdl(wanted: bool) -> Iterator[None]:
    """What Inductor compiles inside starts early, if that is wanted, on GPUs that can."""
    from torch._inductor import config

    with config.patch({"triton.enable_pdl": True}) if wanted else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def waiting_first() -> Iterator[None]:
    """Kernels that Inductor writes inside, and that start early for whatever reason, wait before they do anything else."""
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel

    if not config.triton.enable_pdl:
        yield
        return
    with marked("kernels wait first"), patch.object(TritonKernel, "_filter_pdl", _wait_first):
        yield


def _wait_first(kernel: Any, code: Any) -> None:
    """In place of Inductor's method that drops superfluous waits from a kernel's body, an IndentedBuffer."""
    mine = (kernel.GDC_WAIT, kernel.GDC_LAUNCH)
    lines = [line for line in code._lines if not (isinstance(line, str) and line.strip() in mine)]
    code._lines = [*mine, *lines] if kernel._enable_pdl_codegen() else lines
