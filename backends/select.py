"""Which backend runs a model: one function for "auto" and for a name that the user gave."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv_pool import KVPool
from paged_attn.attn_ops.spec import AttentionSpec
from paged_attn.backends.base import AttentionBackend
from paged_attn.backends.capabilities import Capabilities, Problem, unmet
from paged_attn.backends.registry import backend_class, backend_names

logger = logging.getLogger("paged_attn")


@dataclass(frozen=True)
class Selection:
    """The backend that was taken, why, and why each other one was not."""

    backend: AttentionBackend
    reason: str
    rejected: dict[str, str]

    def describe(self) -> str:
        others = "; ".join(f"{name}: {why}" for name, why in self.rejected.items())
        return f"{self.backend.name} ({self.reason})" + (f"; not taken: {others}" if others else "")


def select(
    name: str,
    layers: Sequence[AttentionSpec],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    device: torch.device,
) -> Selection:
    """Pick the first backend, in order of preference, that can run every layer.

    Raises:
        ValueError: `name` is neither "auto" nor registered.
        UnsupportedError: the named backend, or every one, can not run some layer; the message holds every reason.
    """
    candidates = backend_names() if name == "auto" else [name]
    problems = problems_of(layers, dtype, kv_dtype, page_size, device)
    rejected: dict[str, str] = {}
    for candidate in candidates:
        cls = backend_class(candidate)
        reasons = reasons_against(cls.capabilities, problems)
        if not reasons:
            others = [n for n in backend_names() if n not in rejected and n != candidate]
            rejected |= {other: "asked for another by name" if name != "auto" else f"ranked after {candidate}" for other in others}
            why = "asked for by name" if name != "auto" else "first in order of preference that fits every layer"
            selection = Selection(cls(), why, rejected)
            logger.info("attention backend: %s", selection.describe())
            return selection
        rejected[candidate] = "; ".join(reasons)
    listed = "\n".join(f"  {candidate}: {why}" for candidate, why in rejected.items())
    raise UnsupportedError(
        f"no attention backend for this model with backend={name!r}:\n{listed}\nTry backend='auto' or see `paged-attn backends`."
    )


def select_for_pool(name: str, pool: KVPool, dtype: torch.dtype | None = None) -> Selection:
    """`select` for the layers, page size, KV dtype and device of a pool; `dtype` is the model's (the pool's if None)."""
    return select(name, pool.layers, dtype or pool.dtype, pool.dtype, pool.page_size, pool.device)


def problems_of(
    layers: Sequence[AttentionSpec], dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, device: torch.device
) -> list[Problem]:
    architecture = None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        architecture = major * 10 + minor
    return [Problem(spec, dtype, kv_dtype, page_size, device.type, architecture) for spec in layers]


def reasons_against(capabilities: Capabilities, problems: Sequence[Problem]) -> list[str]:
    """Missing packages and unmet needs; a need that several layers share is named once, with the first such layer."""
    reasons = [
        f"{r.module} {r.version} is not installed: {r.install}"
        for r in capabilities.requirements
        if importlib.util.find_spec(r.module) is None
    ]
    seen: dict[str, str] = {}
    for index, problem in enumerate(problems):
        for reason in unmet(capabilities, problem) if problem.spec.by_backend else ():
            seen.setdefault(reason, f"layer {index}" + (f" ({problem.spec.module})" if problem.spec.module else ""))
    return reasons + [f"{reason} [{where}]" for reason, where in seen.items()]
