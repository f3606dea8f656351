"""Has Inductor's processes also build what launches their kernels, where Triton writes that in C.

Inductor launches most kernels itself, but leaves those that start early (PDL) to Triton. Up to 3.6, Triton then has a C compiler build a
launcher for each signature: about half a second each, one after the other, in the process that starts the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch


def writes_launchers() -> bool:
    """Whether the installed Triton has launchers built in C."""
    if find_spec("triton") is None or find_spec("triton.backends.nvidia") is None:
        return False
    from triton.backends.nvidia import driver

    return hasattr(driver, "make_launcher")


@contextlib.contextmanager
def building_launchers() -> Iterator[None]:
    """Inside, launchers are in Triton's cache on disk when Inductor's kernels come back."""
    if not writes_launchers():
        yield
        return
    from torch._inductor import async_compile

    with patch.object(async_compile, "_worker_compile_triton", compile_with_launchers):
        yield


def compile_with_launchers(*arguments: Any) -> Any:
    """Replaces `_worker_compile_triton` of Inductor, with its arguments and result; runs in a process of Inductor's."""
    from torch._inductor.runtime.compile_tasks import _worker_compile_triton
    from torch._inductor.runtime.triton_heuristics import TritonCompileResult
    from triton.backends.nvidia.driver import CudaLauncher

    kernel, microseconds = _worker_compile_triton(*arguments)
    for result in kernel.compile_results:
        if isinstance(result, TritonCompileResult) and result.kernel.metadata.target.backend == "cuda":
            CudaLauncher(result.kernel.src, result.kernel.metadata)
    return kernel, microseconds
