"""Random layers of experts for tests of what computes them."""

from __future__ import annotations

from typing import Any

import torch

from paged_attn.attn_ops.ops.experts import experts_one_by_one
from paged_attn.attn_ops.specs.experts import Gating

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATINGS = {
    "silu": Gating(),
    "gelu": Gating("gelu"),
    "gelu_tanh": Gating("gelu_tanh"),
    "relu2 without a gate": Gating("relu2", gated=False),
    "interleaved, clamped, alpha": Gating("silu", True, True, 7.0, 1.702),
    "clamped": Gating("silu", limit=0.5),
    "up first": Gating("gelu", up_first=True),
    "up first, interleaved, clamped": Gating("silu", True, True, 0.5, 1.702, up_first=True),
    "soft caps": Gating("silu", gate_softcap=2.0, up_softcap=0.5),
    "a soft cap of up": Gating("silu", interleaved=True, up_softcap=0.5),
}


def operands(
    tokens: int, gating: Gating, *, experts: int = 6, top_k: int = 2, hidden: int = 48, width: int = 20, bias: bool = False,
    transposed: bool = False, apart: bool = False, dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:  # fmt: skip
    numbers = torch.Generator().manual_seed(tokens)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=numbers).to(DEVICE, dtype)

    def weight(rows: int, columns: int) -> torch.Tensor:
        size = columns**-0.5  # else float16 overflows at published widths
        return size * random(experts, columns, rows).transpose(1, 2) if transposed else size * random(experts, rows, columns)

    rows = width * (1 + gating.gated)
    ids = torch.rand(tokens, experts, generator=numbers).topk(top_k, dim=1).indices.to(DEVICE)
    biases = (random(experts, rows), random(experts, hidden)) if bias else (None, None)
    w1, w2 = weight(rows, hidden), weight(hidden, width)
    if apart:  # all gates, and all ups behind them, as two parameters of a model that lie in one tensor
        w1 = w1.view(experts, 2, width, hidden).transpose(0, 1).contiguous().transpose(0, 1)
    return random(tokens, hidden), ids, random(tokens, top_k).abs(), w1, w2, *biases, gating


def with_loads(loads: tuple[int, ...], **sizes: Any) -> tuple[Any, ...]:
    """Operands whose experts get so many tokens each, in any order, and seven tokens whose id no expert has; top_k is 1."""
    tokens, experts = sum(loads) + 7, len(loads)
    x, ids, *others = operands(tokens, Gating(), experts=experts, top_k=1, **sizes)
    each = torch.tensor([expert for expert, load in enumerate((*loads, 7)) for _ in range(load)])
    ids.copy_(each[torch.randperm(tokens, generator=torch.Generator().manual_seed(0))][:, None])
    return x, ids, *others


def in_float32(given: tuple[Any, ...]) -> torch.Tensor:
    """What a layer makes of its tokens, by the reference."""
    x, ids, weights, *tensors, gating = given
    wide = (None if each is None else each.float() for each in tensors)
    return experts_one_by_one(x.float(), ids, weights, *wide, gating)  # type: ignore[arg-type]


def close(given: torch.Tensor, expected: torch.Tensor, limit: float = 1e-5) -> bool:
    return bool((given.double() - expected.double()).norm() <= limit * expected.double().norm())
