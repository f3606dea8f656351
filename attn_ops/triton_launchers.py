"""What launches a kernel, which Triton up to 3.6 has a C compiler build for each signature, in about half a second."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any


@cache
def writes_launchers() -> bool:
    """Whether the installed Triton has launchers built in C."""
    if find_spec("triton") is None or find_spec("triton.backends.nvidia") is None:
        return False
    from triton.backends.nvidia import driver

    return hasattr(driver, "make_launcher")


def build_launcher(compiled: Any) -> None:
    """Into Triton's cache on disk, that of a kernel which Triton compiled for an NVIDIA GPU. Only where Triton `writes_launchers`."""
    from triton.backends.nvidia.driver import CudaLauncher

    CudaLauncher(compiled.src, compiled.metadata)
