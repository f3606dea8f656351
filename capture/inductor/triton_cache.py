"""Where Triton keeps compiled kernels, and which assembler it uses: the same in every process."""

from __future__ import annotations

import os
from importlib.util import find_spec

VARIABLE = "TRITON_CACHE_DIR"


def pin_triton_cache() -> None:
    """Have Triton keep compiled kernels in its own folder, unless the user has named one, and assemble them with Inductor's `ptxas`.

    Inductor changes both on its way. It moves the cache to a folder of its own when it first loads a kernel
    (`torch._inductor.runtime.triton_heuristics`), and names its assembler, which Triton's keys depend on, when it first compiles one in
    the process itself and not in a worker (`torch._inductor.async_compile`). Kernels that are compiled before and after that, such as
    those of attention, would be looked up in two places, and a process that meets them in another order compiled them again. To be called
    before Inductor is used.
    """
    if find_spec("triton") is None:
        return
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()
    if VARIABLE not in os.environ:
        from triton import knobs

        os.environ[VARIABLE] = str(knobs.cache.dir)
