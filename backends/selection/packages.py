"""Every optional package as data. Nothing here imports one: versions come from installed metadata."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from paged_attn.attn_ops.install_line import install_line
from paged_attn.backends.needs import Requirement


@dataclass(frozen=True)
class OptionalPackage:
    """Import name; distributions that contain it, first the one to install; what it provides; the install line."""

    module: str
    distributions: tuple[str, ...]
    gives: str
    install: str
    is_kernels: bool = False  # attention backends run on it

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str | None:
        """None if it is not installed; "unknown" for a module without a distribution (such as a source tree on the path)."""
        return installed_version(self.module, self.distributions)


PACKAGES = (
    OptionalPackage(
        "triton", ("triton", "pytorch-triton", "triton-windows"), "the Triton backend and Inductor's kernels", "pip install triton", True
    ),
    OptionalPackage("flashinfer", ("flashinfer-python",), "FlashInfer's paged attention kernels (CUDA)", install_line("flashinfer"), True),
    OptionalPackage(
        "sgl_kernel",
        ("sglang-kernel", "sgl-kernel"),
        "SGLang's builds of FlashAttention 3 and FlashMLA (Hopper) and of CUTLASS MLA (Blackwell), products of experts",
        install_line("sgl"),
        True,
    ),
    OptionalPackage("fla", ("fla-core", "flash-linear-attention"), "kernels for linear attention (CUDA)", install_line("fla")),
    OptionalPackage("flash_attn", ("flash-attn",), "FlashAttention 2 with pages (CUDA)", install_line("flash-attn"), True),
    OptionalPackage("matplotlib", ("matplotlib",), "plots of the benchmarks", install_line("bench")),
    OptionalPackage("fastapi", ("fastapi",), "the HTTP server", install_line("serve")),
    OptionalPackage("uvicorn", ("uvicorn",), "the HTTP server", install_line("serve")),
    OptionalPackage("prometheus_client", ("prometheus-client",), "the HTTP server's metrics", install_line("serve")),
    OptionalPackage("jinja2", ("jinja2",), "chat templates, and the HTTP server", install_line("serve")),
    OptionalPackage("llguidance", ("llguidance",), "answers that follow a schema or grammar", install_line("structured")),
)


def installed_version(module: str, distributions: tuple[str, ...]) -> str | None:
    """None if the module is not installed; "unknown" if none of the distributions that may contain it is."""
    if importlib.util.find_spec(module) is None:
        return None
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def unmet_requirement(requirement: Requirement) -> str | None:
    """Why the requirement is not met here (found, needed, install line); None if it is."""
    reason = why_unmet(requirement)
    return f"{reason}: {requirement.install}" if reason else None


def unmet_requirements(requirements: Iterable[Requirement]) -> list[str]:
    """The reasons of all requirements that are not met."""
    return list(filter(None, map(unmet_requirement, requirements)))


def why_unmet(requirement: Requirement) -> str | None:
    """`unmet_requirement` without the install line, which contains the path of this installation."""
    module, needed = requirement.module, requirement.version
    distributions = next((package.distributions for package in PACKAGES if package.module == module), (module,))
    found = installed_version(module, distributions)
    if found is None:
        return f"{requirement_words(requirement)} is not installed"
    if not needed:
        return None
    try:
        if Version(found) >= Version(needed):
            return None
    except InvalidVersion:
        return f"needs {module} {needed} or newer, and the version of the installed one is {found}"
    return f"needs {module} {needed} or newer, found {found}"


def requirement_words(requirement: Requirement) -> str:
    """`flashinfer 0.6.8`"""
    return f"{requirement.module} {requirement.version}".strip()
