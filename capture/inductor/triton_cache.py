"""Where Triton keeps compiled kernels, and which assembler it uses, the same in every process; the start of Inductor's processes."""

from __future__ import annotations

import os
from importlib.util import find_spec

VARIABLE = "TRITON_CACHE_DIR"


def pin_triton_cache() -> None:
    """Have Triton keep compiled kernels in its own folder, unless the user named one, and assemble them with Inductor's `ptxas`.

    Call this before Inductor is used, because Inductor changes both while it runs:

    - When it first loads a kernel, it moves the cache to its own folder (`torch._inductor.runtime.triton_heuristics`).
    - When it first compiles one in the process itself instead of a worker, it sets its assembler, on which Triton's keys depend
      (`torch._inductor.async_compile`).

    Kernels compiled before and after, such as those of attention, would then be looked up in two places. A process that meets them in
    another order would compile them again.
    """
    if find_spec("triton") is None:
        return
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()
    if VARIABLE not in os.environ:
        from triton import knobs

        os.environ[VARIABLE] = str(knobs.cache.dir)


def start_workers() -> None:
    """Start them early, because they take some five seconds, during which Inductor would compile kernels one by one in this process."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()
