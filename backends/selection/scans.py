"""Which backends for scans exist, and which of them computes an op of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.scans import Kernels
from paged_attn.backends.scans.base import ScanProblem, ScansBackend
from paged_attn.backends.selection.by_name import OurBackends, rejected_suffix

BUILT_IN = {
    "triton": "paged_attn.backends.scans.triton.backend:TritonScans",
    "fla": "paged_attn.backends.scans.fla:FlaScans",
    "flashinfer": "paged_attn.backends.scans.flashinfer:FlashInferScans",
    "torch": "paged_attn.backends.scans.plain_torch:TorchScans",
}
ORDER = ("triton", "torch")  # "auto" takes the first that fits
NOT_MEASURED = "not measured beside ours yet; scans_backend={!r} takes it"
scans_backend = OurBackends[ScansBackend, ScanProblem]("scans_backend", BUILT_IN)
reasons_against = scans_backend.reasons_against


class NoBackendFits(UnsupportedError):
    """No backend for scans computes this op of a layer here."""


@dataclass(frozen=True)
class ScanSelection:
    """The backend for an op, the one for what it lacks (`rest`), and why each other backend that supports the op was not taken."""

    op: str
    name: str
    rest: str
    rejected: dict[str, str]

    def describe(self) -> str:
        """`kda by torch (not taken: fla: ...)`"""
        return f"{self.op} by {self.name}" + rejected_suffix(self.rejected)


def select_scan(name: str, problem: ScanProblem) -> ScanSelection:
    """The first that fits for "auto", and if the named backend does not support the op; else the named one.

    Raises:
        ValueError: an unknown name.
        UnsupportedError: the named backend supports the op, but not in this form; the message has every reason.
        NoBackendFits: one that is not named, and none computes it.
    """
    asked = name != "auto" and problem.op in scans_backend(name).ops
    if asked and (reasons := reasons_against(name, problem)):
        raise UnsupportedError(
            f"scans_backend={name!r} cannot compute {problem.describe()}: {'; '.join(reasons)}. Try scans_backend='auto'."
        )
    first = next((each for each in ORDER if not reasons_against(each, problem)), None)
    if first is None:
        why = "; ".join(f"{each}: {', '.join(reasons_against(each, problem))}" for each in ORDER)
        raise NoBackendFits(f"no backend computes {problem.describe()} ({why})")
    taken = name if asked else first
    rejected = {}
    for other in BUILT_IN:
        if other == taken or problem.op not in scans_backend(other).ops:
            continue
        ranked = f"ranked after {taken}" if other in ORDER else NOT_MEASURED.format(other)
        rejected[other] = "; ".join(reasons_against(other, problem)) or ("asked for another by name" if asked else ranked)
    return ScanSelection(problem.op, taken, taken if taken in ORDER else first, rejected)


def kernels_of(selections: Iterable[ScanSelection]) -> Kernels:
    """The kernels that replace the functions of `attn_ops/scans/` in a layer with these selections."""
    names = {name for each in selections for name in (each.name, each.rest)}
    ranked = sorted(names, key=lambda name: name not in ORDER)  # backends that support only some ops come before those that support all
    return {function: kernel for name in ranked for function, kernel in scans_backend(name).kernels().items()}
