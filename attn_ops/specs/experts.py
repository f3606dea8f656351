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
    """x bent smoothly to between -softcap and softcap (nearly x where x is small); x itself if softcap is 0."""
    return torch.tanh(x / softcap) * softcap if softcap else x


@dataclass(frozen=True)
class Gating:
    """What is computed between an expert's two products.

    Attributes:
        activation: a name in ACTIVATIONS.
        gated: the first product has two halves, gate and up, and the activation of gate is multiplied with up.
        interleaved: gate and up alternate, instead of all of gate first.
        limit: first of all, gate is clamped to at most this, and up to between minus this and this; 0: no limit.
        alpha: the activation is gate * sigmoid(alpha * gate), and 1 is added to up (gpt-oss); 0: it is `activation`.
        gate_softcap, up_softcap: before they are multiplied, up and the factor gate of silu are softcapped in float32 (Inkling 2); the
            sigmoid takes gate itself; 0: no softcap.
        up_first: up comes before gate, in halves or in each alternating pair.
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
        """The op's arguments, listed one by one because Dynamo of torch 2.11 cannot trace `astuple` on Python 3.11."""
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
        """[..., 2 I] -> [..., I], or [..., I] -> [..., I] if nothing is gated, in the same dtype."""
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
    """A layer of experts: how many, the widths of a token and between an expert's two products, and the gating between them."""

    experts: int
    hidden: int
    inner: int
    gating: Gating = Gating()
    has_bias: bool = False

    def describe(self) -> str:
        """`128 experts of 2048 x 768, silu(gate) * up`"""
        return f"{self.experts} experts of {self.hidden} x {self.inner}, {self.gating.describe()}" + ", with biases" * self.has_bias
