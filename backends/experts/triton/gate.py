"""The gate between an expert's two products, in Triton; `Gating` says what it computes."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """float32, as ACTIVATIONS in attn_ops/specs/experts.py define it."""
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # 0.5 (1 + tanh(y)) is sigmoid(2 y)
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif ACTIVATION == "sigmoid":
        x = tl.sigmoid(x)
    return x


@triton.jit
def softcapped(x, SOFTCAP: tl.constexpr):
    if SOFTCAP > 0.0:
        x = SOFTCAP * (2.0 * tl.sigmoid(2.0 / SOFTCAP * x) - 1.0)  # SOFTCAP tanh(x / SOFTCAP)
    return x


@triton.jit
def gated(
    gate, up, limit, alpha, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_ALPHA: tl.constexpr,
    GATE_SOFTCAP: tl.constexpr, UP_SOFTCAP: tl.constexpr, UP_FIRST: tl.constexpr,
):  # fmt: skip
    """float32 gate and up -> their product."""
    if UP_FIRST:
        gate, up = up, gate
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if GATE_SOFTCAP + UP_SOFTCAP > 0.0:
        result = softcapped(gate, GATE_SOFTCAP) * tl.sigmoid(gate) * softcapped(up, UP_SOFTCAP)
    elif HAS_ALPHA:
        result = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    else:
        result = activated(gate, ACTIVATION) * up
    return result
