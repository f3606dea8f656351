"""Which backends for experts exist, and which of them computes a layer."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.backends.experts.base import ExpertsBackend, ExpertsProblem
from paged_attn.backends.selection.by_name import OurBackends, rejected_suffix

logger = logging.getLogger("paged_attn")
BUILT_IN = {
    "triton": "paged_attn.backends.experts.triton.backend:TritonExpertsBackend",
    "grouped_mm": "paged_attn.backends.experts.grouped_mm:GroupedMmBackend",
    "one_by_one": "paged_attn.backends.experts.one_by_one:OneByOneBackend",
    "flashinfer": "paged_attn.backends.experts.flashinfer:FlashInferExpertsBackend",
    "sgl_kernel": "paged_attn.backends.experts.sgl_kernel.backend:SglKernelExpertsBackend",
}
# "auto" takes the first that fits. On a CPU torch's grouped product loops over all experts.
ORDER = {"cpu": ("one_by_one", "grouped_mm"), "": ("triton", "grouped_mm", "one_by_one")}
experts_backend = OurBackends[ExpertsBackend, ExpertsProblem]("experts_backend", BUILT_IN)
reasons_against = experts_backend.reasons_against


@dataclass(frozen=True)
class ExpertsSelection:
    """The selected backend, and why each other one was not selected."""

    name: str
    rejected: dict[str, str]

    def describe(self) -> str:
        return self.name + rejected_suffix(self.rejected)


def select_experts(name: str, problem: ExpertsProblem) -> ExpertsSelection:
    """The first that fits for "auto", else the named one.

    Raises:
        ValueError: an unknown name.
        UnsupportedError: the named backend, or every backend, cannot run the layer; the message has every reason.
    """
    if name != "auto":
        if reasons := reasons_against(name, problem):
            raise UnsupportedError(_refusal(name, problem, {name: "; ".join(reasons)}))
        return ExpertsSelection(name, {other: "asked for another by name" for other in BUILT_IN if other != name})
    order, rejected = ORDER.get(problem.device.partition("-")[0], ORDER[""]), dict[str, str]()
    for each in order:
        if reasons := reasons_against(each, problem):
            rejected[each] = "; ".join(reasons)
            continue
        later = {other: f"ranked after {each}" for other in order[order.index(each) + 1 :]}
        return ExpertsSelection(each, rejected | later)
    raise UnsupportedError(_refusal(name, problem, rejected))


def _refusal(name: str, problem: ExpertsProblem, against: dict[str, str]) -> str:
    listed = "\n".join(f"  {backend}: {why}" for backend, why in against.items())
    fits = [each for each in BUILT_IN if not reasons_against(each, problem)]
    hint = f"What fits: {', '.join(fits)}. Try experts_backend='auto'." if fits else "Leave the pass out: disable_passes=('experts',)."
    return f"no backend for {problem.spec.describe()} with experts_backend={name!r}:\n{listed}\n{hint}"
