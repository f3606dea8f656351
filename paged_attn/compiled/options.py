"""What `torch.compile(model, backend="paged_attn", options={...})` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged_attn.compiled.steps_ahead import RunsWith

_TYPES = {"inductor": (bool, type(None)), "self_check": (bool,)}  # the other options are for engines
ALLOWED = (
    f"Known options: {', '.join(_TYPES)}. Settings of the engine that generate runs on are variables, such as PAGED_ATTN_PAGE_SIZE=32, set "
    "before its first call (docs/settings.md)"
)


@dataclass(frozen=True)
class CompileOptions:
    """Options of the compile backend.

    Attributes:
        inductor: compile the pieces between attentions with Inductor. None means on CUDA yes, elsewhere no (Inductor's C++
            compiles take minutes on a laptop).
        self_check: before the first paged batch, compare the rewritten graph with the original on a small ragged probe.
        pdl: for engines only, as it pays in graphs: see `paged_attn.capture.inductor.pdl`.
        runs_with: for engines only: what steps will run with, so that kernels can be compiled before; it changes nothing in the graph.
        max_loras, max_lora_rank: for engines only: room for so many adapters of such a rank, and a graph with them beside that without.
        passes: for engines only, as whoever calls the graph must merge weights, and give the rows whose logits are wanted as a tensor;
            names in the order of `OPTIONAL`, since the key of a cached graph holds them as they stand.
        experts_backend, scans_backend: for engines only: "auto" or a name of `paged_attn.backends.selection.experts`, or `.scans`.
        state_dtype: for engines only: "auto", or what recurrent states of a 16-bit model are kept in.
    """

    inductor: bool | None = None
    self_check: bool = True
    pdl: bool = False
    passes: tuple[str, ...] = ()
    experts_backend: str = "auto"
    scans_backend: str = "auto"
    state_dtype: str = "auto"
    runs_with: RunsWith | None = None
    max_loras: int = 0
    max_lora_rank: int = 0

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> CompileOptions:
        """Raises ValueError for an unknown option, listing the known ones, and TypeError for a wrong type."""
        for name, value in (given or {}).items():
            if name not in _TYPES:
                raise ValueError(f"unknown option {name!r} for backend='paged_attn'. {ALLOWED}")
            if not isinstance(value, _TYPES[name]):
                words = " or ".join("None" if t is type(None) else t.__name__ for t in _TYPES[name])
                raise TypeError(f"option {name!r} of backend='paged_attn' is {value!r}; allowed is {words}")
        return cls(**dict(given or {}))
