"""What backends of every kind of operation may require of a machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from paged_attn.attn_ops.install_line import install_line

HALF = frozenset({torch.bfloat16, torch.float16})
UP_TO_FLOAT32 = HALF | {torch.float32}
UP_TO_FLOAT64 = UP_TO_FLOAT32 | {torch.float64}


@dataclass(frozen=True)
class Requirement:
    """An optional package: import name, lowest version ("" for any) and the line that installs it."""

    module: str
    version: str
    install: str


@contextmanager
def importing(backend: str, what: str, requirement: Requirement) -> Iterator[None]:
    """Turns failures of imports from an optional package into an ImportError that names what is needed and the install line."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(f"the {backend} backend needs {what}: {requirement.install} (found: {error})") from error


TRITON = Requirement("triton", "3.6", "pip install 'triton>=3.6'")
FLASHINFER = Requirement("flashinfer", "0.6.8", install_line("flashinfer"))
SGL_KERNEL = Requirement("sgl_kernel", "0.4.2", install_line("sgl"))


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Where a backend runs, and what it needs.

    Attributes:
        devices: words of `device_word`: "cpu", "cuda", "hip", "npu", "xpu"; "cpu-amx" is a CPU with AMX, which "cpu" includes.
        dtypes: of the operands.
        architectures: of CUDA devices, 90 for SM90; empty: any.
        requirements: packages that are not always installed.
        note: a remark for tables.
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    architectures: frozenset[int] = frozenset()
    requirements: tuple[Requirement, ...] = ()
    note: str = ""

    def runs_on(self, device: str) -> bool:
        """Whether it runs on the device with that word, apart from architectures."""
        return device in self.devices or device.partition("-")[0] in self.devices


def wrong_device(needs: Needs, device: str, architecture: int | None) -> str:
    """Why it cannot run on a device, or ""."""
    if not needs.runs_on(device):
        return f"runs on {names_of(needs.devices) or 'no device'}, not on {device}"
    if needs.architectures and architecture not in needs.architectures:
        return f"needs {architecture_words(needs.architectures)}, this GPU is SM{architecture}"
    return ""


def unmet_needs(needs: Needs, dtype: torch.dtype, device: str, architecture: int | None) -> list[str]:
    """Every reason why it cannot run there with this dtype, apart from packages; empty if it can."""
    reasons = [wrong] if (wrong := wrong_device(needs, device, architecture)) else []
    if dtype not in needs.dtypes:
        reasons.append(f"dtype {short_dtype(dtype)} is not among {names_of(map(short_dtype, needs.dtypes))}")
    return reasons


def architecture_words(architectures: Iterable[int]) -> str:
    """`{100, 90}` -> "SM90, SM100"."""
    return ", ".join(f"SM{a}" for a in sorted(architectures))


def short_dtype(dtype: torch.dtype) -> str:
    """`bfloat16`"""
    return str(dtype).removeprefix("torch.")


def names_of(values: Iterable[str]) -> str:
    """Sorted and separated by commas."""
    return ", ".join(sorted(values))
