"""What a backend can run and what a layer needs, as data; `unmet` compares the two and is pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.needs import Needs, names_of, short_dtype, unmet_needs


class Feature(enum.Enum):
    WINDOW = "sliding window"
    CHUNK = "chunked attention"
    DUAL_CHUNK = "dual chunk attention"
    SOFTCAP = "softcap"
    SINKS = "attention sinks"
    ALIBI = "ALiBi"
    POSITION_BIAS = "biases by distance or key"
    BIDIRECTIONAL = "bidirectional attention"
    WINDOW_AHEAD = "windows of later keys"
    MLA = "multi-head latent attention"
    FP8_KV = "fp8 KV"
    DETERMINISTIC = "batch-invariant results"
    LSE = "log-sum-exp output"
    UNEQUAL_DIMS = "v head dim unlike qk's"


PHASES = frozenset({"extend", "decode"})  # `forward_extend` and `forward_decode` of the contract


class GraphSupport(enum.Enum):
    NEVER = "never"
    UNIFORM_DECODE = "uniform decode"
    ALWAYS = "always"


DECODE_GRAPHS = {"extend": GraphSupport.NEVER, "decode": GraphSupport.UNIFORM_DECODE}


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


class OneOf(frozenset[int]):
    """Some integers: `OneOf({64, 96, 128})`."""

    def __str__(self) -> str:
        return ", ".join(map(str, sorted(self))) or "none"


@dataclass(frozen=True)
class Both:
    """The integers in two sets, for a backend made of two."""

    first: Sizes
    second: Sizes

    def __contains__(self, value: int) -> bool:
        return value in self.first and value in self.second

    def __str__(self) -> str:
        return f"both {self.first} and {self.second}"


Sizes: TypeAlias = Span | OneOf | Both
ANY_SIZE = Span(1, 1 << 30)
LATENTS_ONLY = OneOf(())  # `head_dims` of kernels that attend only to rows of latents
NO_LATENTS = "runs layers of latents only"


@dataclass(frozen=True, kw_only=True)
class Capabilities(Needs):
    """Everything that `unmet` needs to know about an attention backend.

    Attributes:
        head_dims: both of q, k and of v. Layers in which these differ need Feature.UNEQUAL_DIMS, or their pair in `dim_pairs`.
        latent_dims: ranks, and widths of the rotated part, of latent layers (Feature.MLA), whose rows are wider than heads. Their keys may
            be wider than values without UNEQUAL_DIMS. None: `head_dims` and the other limits hold for latent layers too.
        dim_pairs: supported (qk, v) head dims that differ, for kernels with only a few such pairs; they need not be in `head_dims`.
        phases: "extend" and "decode", or the one that the backend serves (see `HybridBackend`).
        graphs: which steps a captured graph may contain, per phase.
        conflicts: features that it supports separately but not together.
    """

    kv_dtypes: frozenset[torch.dtype]
    features: frozenset[Feature]
    head_dims: Sizes = ANY_SIZE
    page_sizes: Sizes = ANY_SIZE
    group_sizes: Sizes = ANY_SIZE
    graphs: dict[str, GraphSupport] = field(default_factory=lambda: {"extend": GraphSupport.NEVER, "decode": GraphSupport.NEVER})
    phases: frozenset[str] = PHASES
    dim_pairs: frozenset[tuple[int, int]] = frozenset()
    latent_dims: tuple[Sizes, Sizes] | None = None
    conflicts: frozenset[frozenset[Feature]] = frozenset()

    @property
    def latents_only(self) -> bool:
        return self.latent_dims is not None and self.head_dims == LATENTS_ONLY


@dataclass(frozen=True)
class Problem:
    """One layer on one device, which a backend is asked to run.

    Attributes:
        device: as in `Capabilities.devices`; architecture: 90 for SM90, None for devices other than CUDA's.
        extra: features required besides those of the layer, such as DETERMINISTIC.
        phases: those that the backend must serve.
    """

    spec: AttentionSpec
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    device: str
    architecture: int | None = None
    extra: frozenset[Feature] = frozenset()
    phases: frozenset[str] = PHASES

    @property
    def features(self) -> frozenset[Feature]:
        spec = self.spec
        needed = {
            Feature.WINDOW: spec.sliding_window is not None,
            Feature.CHUNK: spec.chunk is not None and spec.chunk_part == "intra",
            Feature.DUAL_CHUNK: spec.chunk_part != "intra",
            Feature.SOFTCAP: spec.softcap is not None,
            Feature.SINKS: spec.has_sinks,
            Feature.ALIBI: spec.alibi_slopes is not None,
            Feature.POSITION_BIAS: spec.bias_index is not None,
            Feature.BIDIRECTIONAL: not spec.causal,
            Feature.WINDOW_AHEAD: spec.window_ahead is not None,
            Feature.LSE: spec.gives_lse,
            Feature.MLA: isinstance(spec, LatentSpec),
            Feature.UNEQUAL_DIMS: spec.qk_head_dim != spec.v_head_dim,
        }
        return frozenset(feature for feature, wanted in needed.items() if wanted) | self.extra


def unmet(capabilities: Capabilities, problem: Problem) -> list[str]:
    """Every reason why a backend with these capabilities cannot run this problem, each with the value; empty if it can.

    Packages are not checked: see `packages.unmet_requirement`.
    """
    spec, features = problem.spec, problem.features
    reasons = unmet_needs(capabilities, problem.dtype, problem.device, problem.architecture)
    if missing := problem.phases - capabilities.phases:
        reasons.append(f"serves {names_of(capabilities.phases) or 'no phase'}, not {names_of(missing)}")
    if problem.kv_dtype not in capabilities.kv_dtypes:
        reasons.append(f"KV dtype {short_dtype(problem.kv_dtype)} is not among {names_of(map(short_dtype, capabilities.kv_dtypes))}")
    dims, head_dims = (spec.qk_head_dim, spec.v_head_dim), capabilities.head_dims
    latent: tuple[tuple[str, int, Sizes], ...] = ()
    if isinstance(spec, LatentSpec) and capabilities.latent_dims is not None:
        head_dims, features, (ranks, rotated) = ANY_SIZE, features - {Feature.UNEQUAL_DIMS}, capabilities.latent_dims
        latent = (("rank of the latent", spec.rank, ranks), ("rotated part of the latent", spec.rotated, rotated))
    elif capabilities.latents_only:
        head_dims, features = ANY_SIZE, features - {Feature.UNEQUAL_DIMS}
        reasons.append(NO_LATENTS)
    elif dims[0] != dims[1] and Feature.UNEQUAL_DIMS not in capabilities.features and capabilities.dim_pairs:
        head_dims, features = ANY_SIZE, features - {Feature.UNEQUAL_DIMS}
        if dims not in capabilities.dim_pairs:
            pairs = ", ".join(f"{qk}/{v}" for qk, v in sorted(capabilities.dim_pairs))
            reasons.append(f"head dims {dims[0]}/{dims[1]} of qk/v are not among {pairs}")
    for what, value, allowed_sizes in (
        ("head dim", dims[0], head_dims),
        ("head dim of v", dims[1], head_dims if dims[0] != dims[1] else ANY_SIZE),
        ("page size", problem.page_size, capabilities.page_sizes),
        ("query heads per KV head", spec.group_size, capabilities.group_sizes),
        *latent,
    ):
        if value not in allowed_sizes:
            reasons.append(f"{what} {value} is not in {allowed_sizes}")
    reasons += [f"no {feature.value}" for feature in sorted(features - capabilities.features, key=lambda f: f.name)]
    together = (sorted(f.value for f in group) for group in capabilities.conflicts if group <= features)
    reasons += sorted(f"no {' together with '.join(names)}" for names in together)
    return reasons
