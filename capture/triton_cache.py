"""Where Triton keeps what it compiled."""

from __future__ import annotations

import os
from importlib.util import find_spec

VARIABLE = "TRITON_CACHE_DIR"


def pin_triton_cache() -> None:
    """Have Triton keep compiled kernels in its own folder throughout, unless the user has named one.

    Inductor moves the cache to a folder of its own when it first loads a kernel (`torch._inductor.runtime.triton_heuristics`). Kernels that
    are compiled before and after that, such as those of attention, then lie in two places, and a process that meets them in another
    order compiles them again. To be called before Inductor is used.
    """
    if VARIABLE not in os.environ and find_spec("triton") is not None:
        from triton import knobs

        os.environ[VARIABLE] = str(knobs.cache.dir)
