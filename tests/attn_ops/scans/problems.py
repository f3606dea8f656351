"""Ragged problems of every recurrence, and what it gives token by token in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.scans.channels import channel_scan_extend, channel_scan_step
from paged_attn.attn_ops.scans.gated_delta import gated_delta_extend, gated_delta_step
from paged_attn.attn_ops.scans.kda import kda_extend
from paged_attn.attn_ops.scans.linear import linear_attention_extend, linear_attention_step
from paged_attn.attn_ops.scans.mamba1 import mamba1_extend, mamba1_step
from paged_attn.attn_ops.scans.mamba2 import mamba2_extend, mamba2_step
from paged_attn.attn_ops.scans.short_conv import short_conv_extend, short_conv_step

SLOTS = 9
LOW, HIGH = 0.05, 1.5


@dataclass(frozen=True)
class Recurrence:
    """One recurrence.

    Attributes:
        given: of so many rows: the tensors per row and the others, in the order of the functions' arguments before the output.
        per_row: which of these have a row per token.
        options: the arguments between the output and the states, for both functions, and for extending requests alone.
        token: the output and the next state of one token, in float64, from its rows, the other tensors and whether it decodes.
    """

    extend: Callable[..., None]
    step: Callable[..., None]
    given: Callable[[int], list[Tensor]]
    per_row: tuple[bool, ...]
    output: tuple[int, ...]
    state: tuple[int, ...]
    token: Callable[..., tuple[Tensor, Tensor]]
    options: tuple[object, ...] = ()
    limits: tuple[float, ...] = ()

    def expected(self, given: Sequence[Tensor], state: Tensor, rows: Sequence[int], decodes: bool) -> tuple[Tensor, Tensor]:
        """[rows, *output] and the state after them, from `state`."""
        outputs, state = [], state.double()
        for row in rows:
            result, state = self.token(*[each[row].double() if own else each.double() for each, own in self._owned(given)], state, decodes)
            outputs.append(result)
        return torch.stack(outputs), state

    def _owned(self, given: Sequence[Tensor]) -> list[tuple[Tensor, bool]]:
        return list(zip(given, self.per_row, strict=True))


def _conv(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, _: bool) -> tuple[Tensor, Tensor]:
    seen = torch.cat([state, x[:, None]], 1)
    return F.silu((seen[:, -weight.shape[1] :] * weight).sum(1) + bias), seen[:, 1:]


def _delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, _: bool) -> tuple[Tensor, Tensor]:
    q, k = (F.normalize(each, dim=-1).repeat_interleave(len(v) // len(k), 0) for each in (q, k))
    state = state * g.exp().reshape(len(v), -1, 1)  # one decay of a head, or one of each channel
    given = torch.einsum("hkv,hk->hv", state, k)
    state = state + torch.einsum("hk,hv->hkv", k, (v - given) * beta[:, None])
    return torch.einsum("hkv,hk->hv", state, q) / q.shape[-1] ** 0.5, state


def _linear_before(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, decodes: bool) -> tuple[Tensor, Tensor]:
    return torch.einsum("hkv,hk->hv", state, q), _linear(q, k, v, g, state, decodes)[1]


def _linear(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, _: bool) -> tuple[Tensor, Tensor]:
    state = state * g.exp().reshape(len(v), -1, 1) + torch.einsum("hk,hv->hkv", k, v)
    return torch.einsum("hkv,hk->hv", state, q), state


def _mamba2(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, decodes: bool) -> tuple[Tensor, Tensor]:
    dt = dt if decodes else dt.clamp(LOW, HIGH)
    b, c = (each.repeat_interleave(len(x) // len(each), 0) for each in (b, c))
    state = state * (dt * a).exp()[:, None, None] + torch.einsum("hp,hn->hpn", x * dt[:, None], b)
    return torch.einsum("hpn,hn->hp", state, c), state


def _mamba1(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, _: bool) -> tuple[Tensor, Tensor]:
    state = state * (dt[:, None] * a).exp() + (dt * x)[:, None] * b
    return state @ c, state


def _channels(decay: Tensor, x: Tensor, state: Tensor, _: bool) -> tuple[Tensor, Tensor]:
    return state, decay * state + x


def _maxima(decay: Tensor, x: Tensor, state: Tensor, _: bool) -> tuple[Tensor, Tensor]:
    return state, torch.maximum(state + decay, x)


def _dt(*shape: int) -> Tensor:
    return F.softplus(torch.randn(*shape) - 1)


RECURRENCES = {
    "short_conv": Recurrence(
        short_conv_extend, short_conv_step, lambda n: [torch.randn(n, 6), torch.randn(6, 3), torch.randn(6)], (True, False, False), (6,),
        (6, 4), _conv, ("silu", ()),
    ),
    "gated_delta_rule": Recurrence(
        gated_delta_extend, gated_delta_step,
        lambda n: [torch.randn(n, 2, 8), torch.randn(n, 2, 8), torch.randn(n, 4, 6), -_dt(n, 4), torch.rand(n, 4)], (True,) * 5, (4, 6),
        (4, 8, 6), _delta, (True,),
    ),
    "kda": Recurrence(
        kda_extend, gated_delta_step,
        lambda n: [torch.randn(n, 2, 8), torch.randn(n, 2, 8), torch.randn(n, 4, 6), -_dt(n, 4, 8), torch.rand(n, 4)], (True,) * 5, (4, 6),
        (4, 8, 6), _delta, (True,),
    ),
    "linear_attention": Recurrence(
        linear_attention_extend, linear_attention_step,
        lambda n: [torch.randn(n, 4, 8), torch.randn(n, 4, 8), torch.randn(n, 4, 6), -_dt(n, 4)], (True,) * 4, (4, 6), (4, 8, 6), _linear,
        (False,),
    ),
    "linear_attention by channel": Recurrence(
        linear_attention_extend, linear_attention_step,
        lambda n: [torch.randn(n, 4, 8), torch.randn(n, 4, 8), torch.randn(n, 4, 6), -_dt(n, 4, 8)], (True,) * 4, (4, 6), (4, 8, 6),
        _linear, (False,),
    ),
    "linear_attention before": Recurrence(
        linear_attention_extend, linear_attention_step,
        lambda n: [torch.randn(n, 4, 8), torch.randn(n, 4, 8), torch.randn(n, 4, 6), -_dt(n, 4)], (True,) * 4, (4, 6), (4, 8, 6),
        _linear_before, (True,),
    ),
    "linear_attention before, by channel": Recurrence(
        linear_attention_extend, linear_attention_step,
        lambda n: [torch.randn(n, 4, 8), torch.randn(n, 4, 8), torch.randn(n, 4, 6), -_dt(n, 4, 8)], (True,) * 4, (4, 6), (4, 8, 6),
        _linear_before, (True,),
    ),
    "mamba2_scan": Recurrence(
        mamba2_extend, mamba2_step,
        lambda n: [torch.randn(n, 4, 6), _dt(n, 4), -torch.rand(4) * 4, torch.randn(n, 2, 8), torch.randn(n, 2, 8)],
        (True, True, False, True, True), (4, 6), (4, 6, 8), _mamba2, (), (LOW, HIGH),
    ),
    "mamba1_scan": Recurrence(
        mamba1_extend, mamba1_step,
        lambda n: [torch.randn(n, 6), _dt(n, 6), -torch.rand(6, 8) * 4, torch.randn(n, 8), torch.randn(n, 8)],
        (True, True, False, True, True), (6,), (6, 8), _mamba1,
    ),
    "channel_scan": Recurrence(
        channel_scan_extend, channel_scan_step, lambda n: [torch.rand(n, 6), torch.randn(n, 6)], (True, True), (6,), (6,), _channels,
        (False, 0.0),
    ),
    "channel_scan of maxima": Recurrence(
        channel_scan_extend, channel_scan_step, lambda n: [-torch.rand(n, 6), torch.randn(n, 6)], (True, True), (6,), (6,), _maxima,
        (True, 0.0),
    ),
}  # fmt: skip


def starts_of(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)][:-1]
