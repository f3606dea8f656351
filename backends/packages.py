"""Every optional package as data. Nothing here imports one: versions come from the installed metadata."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class OptionalPackage:
    """Import name, distributions that carry it (the one to install first), what it gives, the line that installs it."""

    module: str
    distributions: tuple[str, ...]
    gives: str
    install: str

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str | None:
        """None if it is not installed; "unknown" for a module without a distribution (a source tree on the path)."""
        if not self.is_installed:
            return None
        for name in self.distributions:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "unknown"


PACKAGES = (
    OptionalPackage(
        "triton", ("triton", "pytorch-triton", "triton-windows"), "the Triton backend and Inductor's GPU kernels", "pip install triton"
    ),
    OptionalPackage(
        "flashinfer", ("flashinfer-python",), "FlashInfer's paged attention kernels (CUDA)", "pip install 'paged-attn[flashinfer]'"
    ),
    OptionalPackage(
        "sgl_kernel", ("sglang-kernel", "sgl-kernel"), "SGLang's FlashAttention 3 build (Hopper)", "pip install 'paged-attn[sgl]'"
    ),
    OptionalPackage("flash_attn", ("flash-attn",), "FlashAttention 2 with a page table (CUDA)", "pip install 'paged-attn[flash-attn]'"),
    OptionalPackage("matplotlib", ("matplotlib",), "plots of the benchmarks", "pip install 'paged-attn[bench]'"),
    OptionalPackage("fastapi", ("fastapi",), "the HTTP server", "pip install 'paged-attn[serve]'"),
    OptionalPackage("uvicorn", ("uvicorn",), "the HTTP server", "pip install 'paged-attn[serve]'"),
)
