"""What a backend can run, as data, and what a layer asks for; `unmet` compares the two and is pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from paged_attn.attn_ops.spec import AttentionSpec


class Feature(enum.Enum):
    WINDOW = "sliding window"
    CHUNK = "chunked attention"
    SOFTCAP = "softcap"
    SINKS = "attention sinks"
    ALIBI = "ALiBi"
    POSITION_BIAS = "biases by distance or key"
    BIDIRECTIONAL = "bidirectional attention"
    CUSTOM_MASK = "custom mask"
    CROSS = "cross-attention"
    MLA = "multi-head latent attention"
    FP8_KV = "fp8 KV"
    FP4_KV = "fp4 KV"
    DETERMINISTIC = "batch-invariant results"
    LSE = "log-sum-exp output"
    UNEQUAL_DIMS = "v head dim unlike qk's"


class GraphSupport(enum.Enum):
    NEVER = "never"
    UNIFORM_DECODE = "uniform decode"
    ALWAYS = "always"


@dataclass(frozen=True)
class Requirement:
    """An optional package: import name, lowest version and the line that installs it."""

    module: str
    version: str
    install: str


@dataclass(frozen=True)
class Span:
    """An inclusive range of integers, optionally in steps."""

    low: int
    high: int
    step: int = 1

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high and (value - self.low) % self.step == 0

    def __str__(self) -> str:
        return f"{self.low} to {self.high}" + (f" in steps of {self.step}" if self.step > 1 else "")


ANY_SIZE = Span(1, 1 << 30)


@dataclass(frozen=True)
class Capabilities:
    """Everything that `unmet` needs to know of a backend; empty `architectures` means any."""

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    kv_dtypes: frozenset[torch.dtype]
    features: frozenset[Feature]
    architectures: frozenset[int] = frozenset()
    head_dims: Span = ANY_SIZE
    page_sizes: Span = ANY_SIZE
    group_sizes: Span = ANY_SIZE
    graphs: dict[str, GraphSupport] = field(default_factory=lambda: {"extend": GraphSupport.NEVER, "decode": GraphSupport.NEVER})
    requirements: tuple[Requirement, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Problem:
    """One layer on one device: what a backend is asked to run. `architecture` is 90 for SM90, None off CUDA."""

    spec: AttentionSpec
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    device: str
    architecture: int | None = None
    extra: frozenset[Feature] = frozenset()

    @property
    def features(self) -> frozenset[Feature]:
        spec = self.spec
        needed = {
            Feature.WINDOW: spec.sliding_window is not None,
            Feature.CHUNK: spec.chunk is not None,
            Feature.SOFTCAP: spec.softcap is not None,
            Feature.SINKS: spec.has_sinks,
            Feature.ALIBI: spec.alibi_slopes is not None,
            Feature.POSITION_BIAS: spec.bias_index is not None,
            Feature.BIDIRECTIONAL: not spec.causal,
            Feature.LSE: spec.gives_lse,
            Feature.UNEQUAL_DIMS: spec.qk_head_dim != spec.v_head_dim,
        }
        return frozenset(feature for feature, wanted in needed.items() if wanted) | self.extra


def unmet(capabilities: Capabilities, problem: Problem) -> list[str]:
    """Every reason why a backend with these capabilities can not run this problem, each with the value; empty if it can."""
    spec, reasons = problem.spec, []
    if problem.device not in capabilities.devices:
        reasons.append(f"runs on {_names(capabilities.devices)}, not on {problem.device}")
    elif capabilities.architectures and problem.architecture not in capabilities.architectures:
        allowed = ", ".join(f"SM{a}" for a in sorted(capabilities.architectures))
        reasons.append(f"needs {allowed}, this GPU is SM{problem.architecture}")
    for what, dtype, allowed_dtypes in (
        ("dtype", problem.dtype, capabilities.dtypes),
        ("KV dtype", problem.kv_dtype, capabilities.kv_dtypes),
    ):
        if dtype not in allowed_dtypes:
            reasons.append(f"{what} {_short(dtype)} is not among {_names(_short(d) for d in allowed_dtypes)}")
    for what, value, allowed_sizes in (
        ("head dim", spec.qk_head_dim, capabilities.head_dims),
        ("head dim of v", spec.v_head_dim, capabilities.head_dims),
        ("page size", problem.page_size, capabilities.page_sizes),
        ("query heads per KV head", spec.group_size, capabilities.group_sizes),
    ):
        if value not in allowed_sizes:
            reasons.append(f"{what} {value} is not in {allowed_sizes}")
    reasons += [f"no {feature.value}" for feature in sorted(problem.features - capabilities.features, key=lambda f: f.name)]
    return reasons


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(values: object) -> str:
    return ", ".join(sorted(map(str, values)))  # type: ignore[call-overload]
