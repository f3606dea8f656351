"""Many requests that begin with the same pages, on every backend: Triton's tiles have several of them, and read what they share once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.triton.backend import TritonBackend
from paged_attn.backends.attention.triton.tiling import few_keys
from paged_attn.backends.machine import machine_of
from tests.backends.problems import make, spec_of
from tests.gpu.test_backends import BF16, CUDA, FP16, FP32, check, runs

PROMPTS = ((640, 70), (650, 3))
FEATURES = ("plain", "softcap", "sinks", "mha", "gqa_7_sinks")


def lengths_for(spec: AttentionSpec, dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """As many decodes as no longer count as a small step, and at least 40."""
    return tuple((640 + 7 * index % 100, 1) for index in range(max(40, few_keys(spec, dtype, machine_of(CUDA)) // 640 + 1)))


@pytest.mark.parametrize(
    ("name", "feature", "prompts", "dtype"),
    runs(*((f, p, BF16) for f in FEATURES for p in ((), PROMPTS)), ("plain", (), FP16), ("plain", (), FP32), ("plain", PROMPTS, FP32)),
)  # fmt: skip
def test_what_requests_share(name: str, feature: str, prompts: tuple[Any, ...], dtype: torch.dtype) -> None:
    spec = spec_of(feature, dim=64)
    check(name, spec, lengths_for(spec, dtype) + prompts, dtype=dtype, layout="shared")


@pytest.mark.parametrize("prompts", [(), PROMPTS])
def test_their_tiles_have_several(prompts: tuple[Any, ...]) -> None:
    case = make(lengths_for(spec := spec_of(dim=64), BF16) + prompts, spec, dtype=BF16, layout="shared").to(CUDA)
    plan = (backend := TritonBackend()).plan(case.batch, case.pool)
    backend.plan_in_graph(plan)
    shares = next(each for each in plan.shares if each.kind.rows == "together")
    assert shares.kind.members > 1 and int((shares.units[: shares.requests] == 0).sum()) > shares.requests // 2
