"""Prompts through the recurrences at the widths that people deploy, in 16 bits, beside the float32 truth.

Triton 3.6 multiplies 16-bit matrices of 16 and 32 columns wrongly on Hopper (triton#11366), which no small float32 model shows.
"""

from __future__ import annotations

import pytest
import torch

from paged_attn.attn_ops.scans.gated_delta import gated_delta_extend
from paged_attn.attn_ops.scans.mamba2 import mamba2_extend
from paged_attn.attn_ops.scans.state_rows import Extends
from paged_attn.backends.scans.triton import prompts

LENGTHS = [(1000,), (200, 1, 64, 33), (16,) * 12]
CLOSE = 2e-2  # of the largest number; the products round to 8 bits


def extends(lengths: tuple[int, ...]) -> Extends:
    count = len(lengths)
    starts = [sum(lengths[:index]) for index in range(count)]
    return Extends(starts, lengths, list(range(1, count + 1)), [index % 2 == 0 for index in range(count)], torch.device("cuda"))


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k_dim, v_dim", [(128, 128), (64, 64), (128, 256), (256, 128), (32, 32), (16, 16)])
def test_gated_delta(k_dim: int, v_dim: int, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rows, heads, where = sum(lengths), 32, extends(lengths)
    query, key = (torch.randn(rows, heads // 2, k_dim, device="cuda").to(dtype) for _ in range(2))
    value = torch.randn(rows, heads, v_dim, device="cuda").to(dtype)
    decay, learned = -torch.rand(rows, heads, device="cuda"), torch.rand(rows, heads, device="cuda").to(dtype)
    states = [torch.randn(len(lengths) + 1, heads, k_dim, v_dim, device="cuda")]
    states.append(states[0].clone())
    outputs = [torch.empty_like(value) for _ in range(2)]
    assert prompts.gated_delta(query, key, value, decay, learned, outputs[0], True, states[0], where)
    gated_delta_extend(query, key, value, decay, learned, outputs[1], True, states[1], where)
    assert far(outputs[0], outputs[1]) < CLOSE
    assert far(states[0], states[1]) < CLOSE


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width, state, groups", [(64, 128, 1), (64, 128, 8), (64, 64, 1), (32, 16, 1), (64, 256, 1)])
def test_mamba2(width: int, state: int, groups: int, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rows, heads, where = sum(lengths), 64, extends(lengths)
    x = torch.randn(rows, heads, width, device="cuda").to(dtype)
    step, rates = torch.randn(rows, heads, device="cuda").abs().to(dtype), -torch.rand(heads, device="cuda")
    b, c = (torch.randn(rows, groups, state, device="cuda").to(dtype) for _ in range(2))
    states = [torch.randn(len(lengths) + 1, heads, width, state, device="cuda")]
    states.append(states[0].clone())
    outputs = [torch.empty_like(x) for _ in range(2)]
    assert prompts.mamba2(x, step, rates, b, c, outputs[0], 0.0, float("inf"), states[0], where)
    mamba2_extend(x, step, rates, b, c, outputs[1], 0.0, float("inf"), states[1], where)
    assert far(outputs[0], outputs[1]) < CLOSE
    assert far(states[0], states[1]) < CLOSE
