"""What `torch.compile(model, backend="paged_attn", options={...})` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class CompileOptions:
    """Options of the compile backend.

    Attributes:
        inductor: compile the pieces between attentions with Inductor. None means on CUDA yes, elsewhere no (Inductor's C++
            compiles take minutes on a laptop).
        merge_linears: make one matrix product of several with one input (q, k and v; gate and up). For engines only: whoever calls the
            graph must merge the weights.
        self_check: before the first paged batch, compare the rewritten graph with the original on a small ragged probe.
    """

    inductor: bool | None = None
    self_check: bool = True
    merge_linears: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> CompileOptions:
        """Raises ValueError for an unknown option, listing the known ones, and TypeError for a wrong type."""
        allowed = {field.name: (bool, type(None)) if field.name == "inductor" else (bool,) for field in fields(cls)}
        del allowed["merge_linears"]
        for name, value in (given or {}).items():
            if name not in allowed:
                raise ValueError(f"unknown option {name!r} for backend='paged_attn'; known options: {', '.join(sorted(allowed))}")
            if not isinstance(value, allowed[name]):
                words = " or ".join("None" if t is type(None) else t.__name__ for t in allowed[name])
                raise TypeError(f"option {name!r} of backend='paged_attn' is {value!r}; allowed is {words}")
        return cls(**dict(given or {}))
