"""What a layer of experts computes, apart from its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


def softcapped(x: Tensor, softcap: float) -> Tensor:
    """Between minus `softcap` and that, nearly x where x is small; x itself for 0."""
    return torch.tanh(x / softcap) * softcap if softcap else x


@dataclass(frozen=True)
class Gating:
    """What stands between an expert's two products.

    Attributes:
        activation: a name in ACTIVATIONS.
        gated: the first product has two halves, gate and up, and the activation of one is multiplied with the other.
        interleaved: gate and up take turns, instead of all of gate first.
        limit: gate is at most this, and up between minus this and this, before anything else; 0: no limit.
        alpha: the activation is gate * sigmoid(alpha * gate), and up is one more (gpt-oss); 0: it is `activation`.
        gate_softcap, up_softcap: before they are multiplied, the factor gate of silu and up are bent to less than this (Inkling 2), in
            float32; the sigmoid is that of gate itself; 0: they are not.
        up_first: of the two halves, or of each two that take turns, up is the first.
    """

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    limit: float = 0.0
    alpha: float = 0.0
    gate_softcap: float = 0.0
    up_softcap: float = 0.0
    up_first: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the op takes it: one by one, since Dynamo of torch 2.11 cannot go through `astuple` on Python 3.11."""
        return (
            self.activation, self.gated, self.interleaved, self.limit, self.alpha, self.gate_softcap, self.up_softcap, self.up_first,
        )  # fmt: skip

    def describe(self) -> str:
        """`silu(gate) * up`, for people."""
        if not self.gated:
            return self.activation
        inner = f"gate * sigmoid({self.alpha:g} * gate) * (up + 1)" if self.alpha else f"{self.activation}(gate) * up"
        limit = f", clamped at {self.limit:g}" if self.limit else ""
        softcaps = f", soft caps {self.gate_softcap:g} and {self.up_softcap:g}" if self.gate_softcap or self.up_softcap else ""
        return inner + limit + softcaps + ", interleaved" * self.interleaved + ", up first" * self.up_first

    def __call__(self, first: Tensor) -> Tensor:
        """[..., 2 I] -> [..., I], or [..., I] -> [..., I] where nothing is gated; in the dtype that it is given."""
        activation = ACTIVATIONS[self.activation]
        if not self.gated:
            return activation(first)
        gate, up = (first[..., ::2], first[..., 1::2]) if self.interleaved else first.chunk(2, dim=-1)
        gate, up = (up, gate) if self.up_first else (gate, up)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.gate_softcap or self.up_softcap:
            gate, up = gate.float(), up.float()
            return (softcapped(gate, self.gate_softcap) * torch.sigmoid(gate) * softcapped(up, self.up_softcap)).to(first.dtype)
        if self.alpha:
            return gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        return activation(gate) * up


@dataclass(frozen=True)
class ExpertsSpec:
    """A layer of experts: how many, the widths of a token and between an expert's two products, and what stands there."""

    experts: int
    hidden: int
    inner: int
    gating: Gating = Gating()
    has_bias: bool = False

    def describe(self) -> str:
        """`128 experts of 2048 x 768, silu(gate) * up`"""
        return f"{self.experts} experts of {self.hidden} x {self.inner}, {self.gating.describe()}" + ", with biases" * self.has_bias
