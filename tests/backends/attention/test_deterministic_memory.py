"""A deterministic step's workspace is known before there is one, and long requests get shorter steps for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.backends.attention.triton.deterministic import LEAST_TOKENS, SHARE, step_tokens, workspace_bytes
from paged_attn.backends.attention.triton.plan import Plan
from paged_attn.backends.machine import Machine, machine_of
from tests.backends.problems import make, spec_of

H200, GIB = Machine(132, hopper=True, early=True), 1 << 30
LLAMA = AttentionSpec(num_q_heads=32, num_kv_heads=8, qk_head_dim=128, v_head_dim=128, scale=0.1)
ROWS = HeadRows(0, 128)
DEEPSEEK = LatentSpec(
    num_q_heads=128,
    num_kv_heads=1,
    qk_head_dim=576,
    v_head_dim=512,
    rotated=64,
    key_dim=128,
    value_dim=128,
    scale=0.1,
    keys=ROWS,
    values=ROWS,
)


@pytest.mark.parametrize("feature", ["plain", "window", "all", "gqa_7"])
def test_it_is_what_a_plan_takes(feature: str) -> None:
    spec = spec_of(feature)
    case = make([(30, 40)], spec)
    plan = Plan.of(case.batch, case.pool, deterministic=True)
    taken = 4 * (plan.partial.numel() + plan.partial_stats.numel())
    specs = [layer for layer in case.pool.layers if layer.by_backend]
    assert workspace_bytes(specs, case.pool.dtype, 40, 70, machine_of(torch.device("cpu"))) == taken > 0


@pytest.mark.parametrize(
    ("spec", "longest", "expected"), [(LLAMA, 8_192, 8_192), (LLAMA, 131_072, 1_024), (LLAMA, None, 1_024), (DEEPSEEK, 163_840, 256)]
)
def test_long_requests_get_shorter_steps(spec: Any, longest: int | None, expected: int) -> None:
    chosen = step_tokens([spec] * 3, torch.bfloat16, longest, 8_192, H200, 140 * GIB)
    taken = workspace_bytes([spec], torch.bfloat16, chosen, longest or 131_072, H200)
    assert chosen == expected and (chosen == LEAST_TOKENS or taken <= SHARE * 140 * GIB)
