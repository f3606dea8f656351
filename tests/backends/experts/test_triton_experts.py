"""Both kernels beside the experts one by one, on ragged loads, odd sizes and strided weights; on a GPU in 16 bits, too."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import pytest
import torch

from paged_attn.attn_ops.ops.experts import experts_one_by_one
from paged_attn.attn_ops.specs.experts import Gating
from tests.backends.experts.operands import DEVICE, GATINGS, close, operands
from tests.covering import every_pair

pytest.importorskip("triton")
from paged_attn.backends.experts.triton import grouped
from paged_attn.backends.experts.triton.backend import reads_each_pair
from paged_attn.backends.experts.triton.few import FewTiling, few_experts
from paged_attn.backends.experts.triton.grouped import GroupedTiling, grouped_experts
from paged_attn.backends.machine import Machine

KERNELS = {
    "few": few_experts,
    "few, other blocks": lambda *given: few_experts(*given, tiling=FewTiling(4, 32, 2, 8, 16, 2)),
    "grouped": grouped_experts,
    "grouped, other blocks": lambda *given: grouped_experts(*given, tiling=GroupedTiling(16, 32, 16)),
}


@pytest.mark.parametrize(("tokens", "gating", "kernel"), every_pair([1, 5], list(GATINGS), list(KERNELS)))
def test_every_gate(tokens: int, gating: str, kernel: str) -> None:
    given = operands(tokens, GATINGS[gating], bias=tokens == 5, transposed=tokens == 5)
    assert close(KERNELS[kernel](*given), experts_one_by_one(*given))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("gating", ["silu", "up first", "soft caps"])
def test_gate_and_up_that_lie_apart(kernel: str, gating: str) -> None:
    apart, together = operands(5, GATINGS[gating], bias=True, apart=True), operands(5, GATINGS[gating], bias=True)
    assert apart[3].dim() == 4 and torch.equal(apart[3].flatten(1, 2), together[3])
    expected = experts_one_by_one(*together)
    assert close(experts_one_by_one(*apart), expected, 1e-6)
    assert close(KERNELS[kernel](*apart), expected)


LOADS = ("one expert has all", "one pair each", "ids of no expert", "no id of an expert")


@pytest.mark.parametrize(
    ("load", "kernel"),
    [*product(LOADS, ["few", "grouped"]), ("more than a block", "grouped")],  # the kernel for few has no blocks of tokens
)
def test_ragged_loads(load: str, kernel: str) -> None:
    tokens = 40 if load == "more than a block" else 4
    given = list(operands(tokens, Gating()))
    if load == "one expert has all":
        given[1] = torch.full_like(given[1], 5)
    elif load == "one pair each":
        given[1], given[2] = torch.tensor([[0], [5], [2], [3]], device=DEVICE), given[2][:, :1].contiguous()
    elif load == "ids of no expert":
        given[1] = given[1].clone()
        given[1][1], given[1][2, 0], given[1][3, 1] = 6, 11, 8  # as expert parallelism marks what other ranks have
    elif load == "no id of an expert":
        given[1] = given[1] + 6
        assert not KERNELS[kernel](*given).any() and not experts_one_by_one(*given).any()
        return
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


@pytest.mark.parametrize("tiling", [None, GroupedTiling(16, 16, 16)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ids", [[5, 0, 2], [5, 5, 5], [6, 1, 9], [6, 7, 8]])  # there are six experts
def test_one_token_is_not_sorted(ids: list[int], transposed: bool, tiling: GroupedTiling | None) -> None:
    given = list(operands(1, GATINGS["interleaved, clamped, alpha"], top_k=3, bias=True, transposed=transposed))
    given[1] = torch.tensor([ids], device=DEVICE)
    expected = experts_one_by_one(*given)
    for _ in range(2):
        result = grouped_experts(*given, tiling=tiling)
        assert close(result, expected) if min(ids) < 6 else not result.any()


@pytest.mark.parametrize(
    ("top_k", "hidden", "width", "narrow"), [(4, 2880, 2880, (False, False)), (1, 5120, 8192, (True, True)), (2, 4096, 4608, (False, True))]
)
def test_one_token_gets_more_loads_and_narrow_blocks_where_wide_ones_leave_half_of_the_gpu_idle(
    top_k: int, hidden: int, width: int, narrow: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of an H200's size; on a gaming GPU buffers shrink until they fit."""
    w1, w2 = torch.empty(8, 2 * width, hidden, device="meta", dtype=torch.bfloat16), torch.empty(8, hidden, width, device="meta")
    monkeypatch.setattr(grouped, "machine_of", lambda _: Machine(132, True, True, shared_bytes=227 << 10, sm90_or_newer=True))
    found = grouped.tilings_for_one(w1, w2, top_k, True)
    wide = ((16, 128, 64, 8, 4), (16, 128, 64, 4, 5))
    expected = [(16, 64, 128, 4, 5) if each else own for each, own in zip(narrow, wide, strict=True)]
    assert [(each.m, each.n, each.k, each.warps, each.stages) for each in found] == expected
    assert grouped.tilings_for_one(w1.float(), w2, top_k, True) == (grouped.tiling_for(0.1, w1.float(), True),) * 2
    monkeypatch.setattr(grouped, "machine_of", lambda _: Machine(132, False, False, shared_bytes=99 << 10))
    for each, halves in zip(grouped.tilings_for_one(w1, w2, top_k, True), (2, 1), strict=True):
        assert (each.stages - 1) * (each.m + halves * each.n) * each.k * 2 <= 99 << 10


@pytest.mark.parametrize(
    ("experts", "top_k", "most"), [(128, 8, 8), (64, 6, 6), (512, 10, 16), (8, 2, 2), (16, 2, 4), (16, 1, 8), (4, 8, 0)],
)  # fmt: skip
def test_tokens_that_share_experts_read_each_once(experts: int, top_k: int, most: int) -> None:
    few = [tokens for tokens in range(1, 40) if reads_each_pair(tokens, top_k, experts)]
    assert few == list(range(1, most + 1))


def test_an_op_is_given_all_of_a_gate() -> None:
    for gating in GATINGS.values():
        assert Gating(*gating.arguments) == gating
    assert len(Gating().arguments) == len(fields(Gating))
