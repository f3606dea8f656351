"""Which weights of experts the kernel for Hopper can copy, and how it steps through them; it compiles without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from paged_attn.backends.experts.triton.hopper import Matrix, hopper_products, matrix_of
from tests.backends.experts.operands import GATINGS, operands
from tests.backends.without_gpu import printed_by


def weight(*size: int) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16)


def element(matrix: Matrix, weight: Tensor, expert: int, n: int, k: int) -> Tensor:
    """As the kernel finds it."""
    flat = weight.as_strided(matrix.shape, (matrix.stride, 1), weight.storage_offset())
    row = expert * matrix.expert_rows
    return flat[row + k, n] if matrix.k_first else flat[row + n, k]


@pytest.mark.parametrize("transposed", (False, True))
def test_rows_are_found(transposed: bool) -> None:
    numbers = torch.arange(3 * 96 * 64).view(3, 96, 64) if not transposed else torch.arange(3 * 96 * 64).view(3, 64, 96).transpose(1, 2)
    matrix = matrix_of(numbers)
    assert matrix is not None and matrix.k_first == transposed and matrix.up_rows == 48
    for expert, n, k in ((0, 0, 0), (2, 95, 63), (1, 50, 7)):
        assert element(matrix, numbers, expert, n, k) == numbers[expert, n, k]


def test_gates_and_ups_that_lie_apart() -> None:
    numbers = torch.arange(2 * 3 * 48 * 64).view(2, 3, 48, 64).transpose(0, 1)
    matrix = matrix_of(numbers)
    assert matrix is not None and matrix.shape == (2 * 3 * 48, 64)
    assert element(matrix, numbers, 2, 5, 7) == numbers[2, 0, 5, 7]
    assert element(matrix, numbers, 2, 5 + matrix.up_rows, 7) == numbers[2, 1, 5, 7]


@pytest.mark.parametrize(
    "given",
    (
        weight(3, 96, 72),  # rows that no whole number of copies fills
        weight(3, 96, 132)[:, :, :128],  # rows that do not begin at 16 bytes
        weight(3, 96, 136)[:, :, 4:132],
        weight(3 * 96 * 64 + 3 * 8).as_strided((3, 96, 64), (96 * 64 + 8, 64, 1)),  # experts at no row of each other
        weight(3, 96, 128)[:, :, ::2],
    ),
)  # fmt: skip
def test_what_can_not_be_copied(given: Tensor) -> None:
    assert matrix_of(given) is None


def test_not_without_a_hopper_gpu() -> None:
    x, ids, _, w1, w2, b1, b2, gating = (each.cpu() if isinstance(each, Tensor) else each for each in operands(
        500, GATINGS["silu"], hidden=64, width=64, dtype=torch.bfloat16
    ))  # fmt: skip
    assert hopper_products(x, w1, w2, b1, b2, gating, ids.numel() / len(w1)) is None


@pytest.mark.slow
def test_compiles_and_spills_nothing_that_counts() -> None:
    rows = printed_by("tests.backends.experts.compile_products")
    assert {row["variant"] for row in rows} >= {*GATINGS, "second", "second, transposed"}
    for row in rows:
        assert row["shared"] <= 227 * 1024 and row["spilled"] <= 16, row
