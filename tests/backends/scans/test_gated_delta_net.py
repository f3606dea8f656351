"""Gated DeltaNet beside the delta rule token by token, and its kernels beside that: gates and norm, rows in order and not, padding, NaN."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.scans.gated_delta_net import Columns, GatedDeltaNet, gated_delta_net_step, net_gates, net_norm
from paged_attn.attn_ops.scans.state_rows import Extends, StateRows
from tests.attn_ops.scans.problems import RECURRENCES, SLOTS, starts_of

pytest.importorskip("triton")
from paged_attn.backends.scans.triton import net

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, WIDTH = 4, 6
CLOSE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


def problem(rows: int, dtype: torch.dtype = torch.float32, act: str = "silu", factor: float = 1.0, offset: float = 0.0) -> GatedDeltaNet:
    """a, b and z are columns of one projection, as Qwen3-Next's are: two groups of [other, z, b, a] for two heads each."""
    projection = torch.randn(rows, 2 * (5 + 2 * WIDTH + 4)).to(DEVICE, dtype)
    group = 5 + 2 * WIDTH + 4
    parts = ([5 + 2 * WIDTH + 2, 2, group, 2], [5 + 2 * WIDTH, 2, group, 2], [5, 2, group, 2 * WIDTH])
    owned = (torch.randn(HEADS), torch.randn(HEADS), torch.rand(WIDTH) + 0.5)
    return GatedDeltaNet(
        *(Columns(projection, part) for part in parts), *(each.to(DEVICE, dtype) for each in owned), factor, 1e-3, offset, act
    )


def operands(rows: int, dtype: torch.dtype) -> list[Tensor]:
    return [value.to(DEVICE, dtype) for value in RECURRENCES["gated_delta_rule"].given(rows)[:3]]


def states_of(slots: Sequence[int]) -> Tensor:
    states = torch.full((SLOTS, *RECURRENCES["gated_delta_rule"].state), float("nan"))
    for slot in slots:
        states[slot] = torch.randn(states.shape[1:])
    return states.to(DEVICE)


@pytest.mark.parametrize("act, factor, offset", [("silu", 1.0, 0.0), ("sigmoid", 2.0, 1.0)])
def test_a_step_is_gates_rule_and_norm(act: str, factor: float, offset: float) -> None:
    torch.manual_seed(1)
    given, of = operands(3, torch.float32), problem(3, act=act, factor=factor, offset=offset)
    states, output = states_of([5, 2]), torch.full((3, HEADS, WIDTH), 7.0, device=DEVICE)
    before = states.clone()
    gated_delta_net_step(*given, of, output, True, states, StateRows(None, torch.tensor([5, 0, 2], device=DEVICE), None))
    assert not output[1].any()
    rows = of.a.rows.double().view(3, 2, -1)
    z, b, a = (part.reshape(3, HEADS, -1) for part in rows[..., 5:].split([2 * WIDTH, 2, 2], -1))
    g, beta = -of.a_log.double().exp() * F.softplus(a[..., 0] + of.dt_bias), factor * b[..., 0].sigmoid()
    for row, slot in ((0, 5), (2, 2)):
        (x,), after = RECURRENCES["gated_delta_rule"].expected([*given, g, beta], before[slot], [row], decodes=True)
        opened = F.silu(z[row]) if act == "silu" else z[row].sigmoid()
        expected = F.rms_norm(x, (WIDTH,), None, of.eps) * (of.scale.double() + offset) * opened
        torch.testing.assert_close(output[row].double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[slot].double(), after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("act, factor, offset", [("silu", 1.0, 0.0), ("sigmoid", 2.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, [6, 0, 3, 4]])
def test_the_kernel_of_decoding_rows(rows: list[int] | None, dtype: torch.dtype, act: str, factor: float, offset: float) -> None:
    torch.manual_seed(2)
    given, of, slots = operands(7, dtype), problem(7, dtype, act, factor, offset), [5, 2, 0, 8]
    states = [states_of([5, 2, 8])]
    states.append(states[0].clone())
    outputs = [torch.full((7, HEADS, WIDTH), 7.0, device=DEVICE, dtype=dtype) for _ in range(2)]
    padding = 2 if rows is None else rows[2]
    of.a.rows[padding] = float("nan")
    decode_rows = None if rows is None else torch.tensor(rows, device=DEVICE)
    where = StateRows(decode_rows, torch.tensor(slots, dtype=torch.int32, device=DEVICE), None)
    gated_delta_net_step(*given, of, outputs[0], True, states[0], where)
    assert net.step(*given, of, outputs[1], True, states[1], where)
    assert not outputs[1][padding].any()
    torch.testing.assert_close(outputs[1], outputs[0], **CLOSE[dtype])
    torch.testing.assert_close(states[1][1:], states[0][1:], equal_nan=True, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_around_a_prompts_rule(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    lengths, of = [1, 5, 40], problem(50, dtype, "sigmoid", 2.0, 1.0)
    extends = Extends([start + 2 for start in starts_of(lengths)], lengths, [3, 8, 1], [True, False, False], torch.device(DEVICE))
    gates = [[torch.empty(50, HEADS, device=DEVICE) for _ in range(2)] for _ in range(2)]
    net_gates(of, *gates[0])
    assert net.gates(of, *gates[1])
    torch.testing.assert_close(gates[1], gates[0], rtol=1e-5, atol=1e-6)
    outputs = [torch.randn(50, HEADS, WIDTH).to(DEVICE, dtype)]
    outputs.append(outputs[0].clone())
    before = outputs[0].clone()
    net_norm(of, outputs[0], extends)
    assert net.norm(of, outputs[1], extends)
    torch.testing.assert_close(outputs[1], outputs[0], **CLOSE[dtype])
    assert torch.equal(outputs[1][[0, 1, 48, 49]], before[[0, 1, 48, 49]]) and not torch.equal(outputs[1][2], before[2])


def test_what_no_kernel_takes_is_said() -> None:
    of, wide = problem(2), torch.zeros(2, 1, 256, 128, device=DEVICE)
    given = [torch.zeros(2, 1, size, device=DEVICE) for size in (256, 256, 128)]
    where = StateRows(None, torch.tensor([1, 0], device=DEVICE), None)
    assert not net.step(*given, of, torch.zeros(2, 1, 128, device=DEVICE), True, wide, where)
    turned = of._replace(a=Columns(of.a.rows.T.contiguous().T, of.a.columns))
    spread = of._replace(dt_bias=torch.zeros(2 * HEADS, device=DEVICE)[::2])
    for each in (turned, spread):
        assert not net.gates(each, *(torch.zeros(2, HEADS, device=DEVICE) for _ in range(2)))
