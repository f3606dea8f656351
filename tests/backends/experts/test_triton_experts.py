"""Both kernels beside the experts one by one, on ragged loads, odd sizes and strided weights; on a GPU in 16 bits, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.attn_ops.ops.experts import experts_one_by_one
from paged_attn.attn_ops.specs.experts import Gating

pytest.importorskip("triton")
from paged_attn.backends.experts.triton.few import FewTiling, few_experts
from paged_attn.backends.experts.triton.grouped import GroupedTiling, grouped_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATINGS = {
    "silu": Gating(),
    "gelu": Gating("gelu"),
    "gelu_tanh": Gating("gelu_tanh"),
    "relu2 without a gate": Gating("relu2", gated=False),
    "interleaved, clamped, alpha": Gating("silu", True, True, 7.0, 1.702),
    "clamped": Gating("silu", limit=0.5),
}
KERNELS = {
    "few": few_experts,
    "few, other blocks": lambda *given: few_experts(*given, tiling=FewTiling(4, 32, 2, 8, 16, 2)),
    "grouped": grouped_experts,
    "grouped, other blocks": lambda *given: grouped_experts(*given, tiling=GroupedTiling(16, 32, 16)),
}


def operands(
    tokens: int, gating: Gating, *, experts: int = 6, top_k: int = 2, hidden: int = 48, width: int = 20, bias: bool = False,
    transposed: bool = False, dtype: torch.dtype = torch.float32,
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
    return random(tokens, hidden), ids, random(tokens, top_k).abs(), weight(rows, hidden), weight(hidden, width), *biases, gating


def close(given: torch.Tensor, expected: torch.Tensor, limit: float = 1e-5) -> bool:
    return bool((given.double() - expected.double()).norm() <= limit * expected.double().norm())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_every_gate(tokens: int, gating: str, kernel: str) -> None:
    given = operands(tokens, GATINGS[gating], bias=tokens == 5, transposed=tokens == 5)
    assert close(KERNELS[kernel](*given), experts_one_by_one(*given))


@pytest.mark.parametrize("kernel", ["few", "grouped"])
@pytest.mark.parametrize("load", ["one expert has all", "one pair each", "ids of no expert", "more than a block"])
def test_ragged_loads(load: str, kernel: str) -> None:
    tokens = 40 if load == "more than a block" else 4
    given = list(operands(tokens, Gating()))
    if load == "one expert has all":
        given[1] = torch.full_like(given[1], 5)
    elif load == "one pair each":
        given[1], given[2] = torch.tensor([[0], [5], [2], [3]], device=DEVICE), given[2][:, :1].contiguous()
    elif load == "ids of no expert":
        given[1] = given[1].clone()
        given[1][1], given[1][2, 0] = 6, 6  # as expert parallelism marks what another rank has
    assert close(KERNELS[kernel](*given), experts_one_by_one(*given))
    if load == "ids of no expert":
        assert not KERNELS[kernel](*given)[1].any()


@pytest.mark.parametrize("kernel", ["few", "grouped"])
def test_a_token_is_computed_by_itself(kernel: str) -> None:
    """Bit by bit the same, whatever else is in the batch, as long as the blocks are the same."""
    tiling = {"few": FewTiling(), "grouped": GroupedTiling(16, 32, 16)}[kernel]
    run = {"few": few_experts, "grouped": grouped_experts}[kernel]
    given = operands(5, Gating())
    together = run(*given, tiling=tiling)
    for token in range(5):
        alone = run(given[0][token : token + 1], given[1][token : token + 1], given[2][token : token + 1], *given[3:], tiling=tiling)
        assert torch.equal(alone[0], together[token])


@pytest.mark.skipif(DEVICE == "cpu", reason="16 bits are computed on a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["few", "grouped"])
@pytest.mark.parametrize("tokens", [1, 8, 64, 700])
def test_published_widths_in_16_bits(tokens: int, kernel: str, dtype: torch.dtype) -> None:
    given = operands(tokens, Gating(), experts=128, top_k=8, hidden=2048, width=768, dtype=dtype)
    wide = tuple(value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value for value in given)
    assert close(KERNELS[kernel](*given), experts_one_by_one(*wide), 0.01)
