"""Prompts through the recurrences at the widths that people deploy, in 16 bits, beside the float32 truth.

Triton 3.6 multiplies 16-bit matrices of 16 and 32 columns wrongly on Hopper (triton#11366), which no small float32 model shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged_attn.attn_ops.batch.requests import StateCheckpoint
from paged_attn.attn_ops.scans.channels import channel_scan_extend
from paged_attn.attn_ops.scans.gated_delta import gated_delta_extend
from paged_attn.attn_ops.scans.kda import kda_extend
from paged_attn.attn_ops.scans.linear import linear_attention_extend
from paged_attn.attn_ops.scans.mamba1 import mamba1_extend
from paged_attn.attn_ops.scans.mamba2 import mamba2_extend
from paged_attn.attn_ops.scans.short_conv import short_conv_extend
from paged_attn.attn_ops.scans.state_rows import Extends
from paged_attn.backends.devices import architecture_of
from paged_attn.backends.scans.base import ScanProblem
from paged_attn.backends.scans.triton import conv, prompts, ssd
from paged_attn.backends.selection.scans import reasons_against, scans_backend

LENGTHS = [(1000,), (200, 1, 64, 33), (16,) * 12]
CLOSE = 2e-2  # of the largest number; the products round to 8 bits


def extends(lengths: tuple[int, ...]) -> Extends:
    count = len(lengths)
    starts = [sum(lengths[:index]) for index in range(count)]
    return Extends(starts, lengths, list(range(1, count + 1)), [index % 2 == 0 for index in range(count)], torch.device("cuda"))


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("k_dim, v_dim", [(128, 128), (64, 64), (128, 256)])
def test_linear_attention(k_dim: int, v_dim: int, lengths: tuple[int, ...]) -> None:
    """MiniMax's heads are 128 by 128, and each has a decay of its own."""
    torch.manual_seed(0)
    rows, heads, where = sum(lengths), 32, extends(lengths)
    query, key = (torch.randn(rows, heads, k_dim, device="cuda", dtype=torch.bfloat16) * k_dim**-0.5 for _ in range(2))
    value = torch.randn(rows, heads, v_dim, device="cuda", dtype=torch.bfloat16)
    decay = -torch.rand(heads, device="cuda").expand(rows, heads)
    states = [torch.randn(len(lengths) + 1, heads, k_dim, v_dim, device="cuda")]
    states.append(states[0].clone())
    outputs = [torch.empty_like(value) for _ in range(2)]
    assert ssd.linear_attention(query, key, value, decay, outputs[0], False, states[0], where)
    linear_attention_extend(query, key, value, decay, outputs[1], False, states[1], where)
    assert far(outputs[0], outputs[1]) < CLOSE
    assert far(states[0], states[1]) < CLOSE


@pytest.mark.parametrize("maximum", [False, True], ids=["sum", "maximum"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_channel_scan(lengths: tuple[int, ...], maximum: bool) -> None:
    """RWKV-4's attention at its published width: the state before each token."""
    torch.manual_seed(0)
    rows, width, where = sum(lengths), 4096, extends(lengths)
    decay, x = -torch.rand(width, device="cuda").expand(rows, width), torch.randn(rows, width, device="cuda")
    decay = decay if maximum else decay.exp()
    states = [torch.randn(len(lengths) + 1, width, device="cuda")]
    states.append(states[0].clone())
    outputs = [torch.empty_like(x) for _ in range(2)]
    assert prompts.channels(decay, x, outputs[0], maximum, -2.0, states[0], where)
    channel_scan_extend(decay, x, outputs[1], maximum, -2.0, states[1], where)
    assert far(outputs[0], outputs[1]) < 1e-5
    assert far(states[0], states[1]) < 1e-5


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
@pytest.mark.parametrize(
    "name, truth",
    [("triton", kda_extend), ("fla", gated_delta_extend), ("fla", kda_extend), ("flashinfer", gated_delta_extend)],
    ids=["kda", "fla", "fla kda", "flashinfer"],
)
def test_kda_and_other_packages(name: str, truth: Callable[..., None], lengths: tuple[int, ...]) -> None:
    """States on the way among them; of what fits here."""
    torch.manual_seed(0)
    rows, heads, by_channel = sum(lengths), 32, truth is kda_extend
    op = "kda" if by_channel else "gated_delta_rule"
    problem = ScanProblem(op, (heads, 128, 128), torch.bfloat16, "cuda", architecture_of(torch.device("cuda")))
    if reasons := reasons_against(name, problem):
        pytest.skip("; ".join(reasons))
    where = dataclasses.replace(extends(lengths), checkpoints={0: [StateCheckpoint(10, len(lengths) + 1)]})
    query, key = (random(rows, heads if by_channel else heads // 2, 128) for _ in range(2))
    decay = -torch.rand(rows, heads, *[128] * by_channel, device="cuda")
    given = [query, key, random(rows, heads, 128), decay, torch.rand(rows, heads, device="cuda").bfloat16()]
    states = [torch.randn(len(lengths) + 2, heads, 128, 128, device="cuda")]
    states.append(states[0].clone())
    outputs = [torch.zeros_like(given[2]) for _ in range(2)]
    assert scans_backend(name).kernels()[truth](*given, outputs[0], True, states[0], where)
    truth(*given, outputs[1], True, states[1], where)
    assert far(outputs[0], outputs[1]) < CLOSE
    assert far(states[0], states[1]) < CLOSE


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width, state, groups", [(64, 128, 1), (64, 128, 8), (64, 64, 1), (32, 16, 1), (64, 256, 1), (128, 256, 1)])
def test_mamba2(width: int, state: int, groups: int, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rows, heads, where = sum(lengths), 64, extends(lengths)
    x = torch.randn(rows, heads, width, device="cuda").to(dtype)
    step, rates = torch.randn(rows, heads, device="cuda").abs().to(dtype), -torch.rand(heads, device="cuda")
    b, c = (torch.randn(rows, groups, state, device="cuda").to(dtype) for _ in range(2))
    states = [torch.randn(len(lengths) + 1, heads, width, state, device="cuda")]
    states.append(states[0].clone())
    outputs = [torch.empty_like(x) for _ in range(2)]
    assert ssd.mamba2(x, step, rates, b, c, outputs[0], 0.0, float("inf"), states[0], where)
    mamba2_extend(x, step, rates, b, c, outputs[1], 0.0, float("inf"), states[1], where)
    assert far(outputs[0], outputs[1]) < CLOSE
    assert far(states[0], states[1]) < CLOSE


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def problem(name: str, rows: int) -> tuple[Callable[..., bool], Callable[..., None], list[Any], torch.Tensor, tuple[int, ...]]:
    """The kernel, the truth, what both are given before the states, the output among it, and the shape of a state."""
    if name == "gated_delta":
        value, decay = random(rows, 32, 128), -torch.rand(rows, 32, device="cuda")
        output = torch.empty_like(value)
        given = [random(rows, 16, 128), random(rows, 16, 128), value, decay, torch.rand_like(decay).bfloat16(), output, True]
        return prompts.gated_delta, gated_delta_extend, given, output, (32, 128, 128)
    if name == "mamba2":
        x, rates = random(rows, 64, 64), -torch.rand(64, device="cuda")
        output = torch.empty_like(x)
        given = [x, random(rows, 64).abs(), rates, random(rows, 1, 128), random(rows, 1, 128), output, 0.0, float("inf")]
        return ssd.mamba2, mamba2_extend, given, output, (64, 64, 128)
    if name == "mamba1":
        x, rates = random(rows, 8192), -torch.rand(8192, 16, device="cuda")
        output = torch.empty_like(x)
        given = [x, random(rows, 8192).abs(), rates, random(rows, 16), random(rows, 16), output]
        return prompts.mamba1, mamba1_extend, given, output, (8192, 16)
    x = random(rows, 8192)
    output = torch.empty_like(x)
    return conv.extend, short_conv_extend, [x, random(8192, 4), random(8192), output, "silu", ()], output, (8192, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gated_delta", "mamba2", "mamba1", "short_conv"])
def test_states_on_the_way_are_bitwise_those_of_steps_that_end_there(name: str, dtype: torch.dtype) -> None:
    """Beside the truth, too. A fresh request with regular ones, one that goes on from a state with one a token after its start."""
    torch.manual_seed(0)
    lengths, slots, fresh, device = [1000, 300, 70], [1, 2, 3], [True, False, False], torch.device("cuda")
    kept = {0: [(256, 4), (512, 5), (768, 6), (992, 7)], 1: [(1, 8), (296, 9)]}
    starts, rows = [0, 1000, 1300], sum(lengths)
    kernel, truth, given, output, shape = problem(name, rows)
    states = [random(10, *shape, dtype=dtype)]
    states += [states[0].clone(), states[0].clone()]
    where = Extends(starts, lengths, slots, fresh, device, {i: [StateCheckpoint(*each) for each in some] for i, some in kept.items()})
    truth(*given, states[0], where)
    expected = output.clone()
    assert kernel(*given, states[1], where)
    found = output.clone()
    for index, (start, length, slot) in enumerate(zip(starts, lengths, slots, strict=True)):
        before = 0
        for end, target in (*kept.get(index, []), (length, slot)):
            step = Extends([start + before], [end - before], [slot], [fresh[index] and not before], device)
            assert kernel(*given, states[2], step)
            states[2][target] = states[2][slot]
            before = end
    assert torch.equal(states[1], states[2]) and torch.equal(found, output)
    assert far(found, expected) < CLOSE and far(states[1], states[0]) < CLOSE
