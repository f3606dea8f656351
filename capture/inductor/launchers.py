"""Has Inductor's processes also build what launches their kernels, where Triton writes that in C.

Inductor launches most kernels itself, but leaves those that start early (PDL) to Triton. Up to 3.6, Triton then has a C compiler build a
launcher for each signature: about half a second each, one after the other, in the process that starts the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from paged_attn.attn_ops.triton_launchers import build_launcher, writes_launchers


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

    kernel, microseconds = _worker_compile_triton(*arguments)
    for result in kernel.compile_results:
        if isinstance(result, TritonCompileResult) and result.kernel.metadata.target.backend == "cuda":
            build_launcher(result.kernel)
    return kernel, microseconds
