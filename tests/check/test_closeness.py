"""When rows count as equal."""

from __future__ import annotations

import math

import pytest
import torch

from paged_attn.tolerances import ROUNDING, logits_apart, rounding, row_errors, typical, worst


def test_a_rows_error_is_relative_to_its_length() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 10.0], [6.0, 8.0]])
    got = expected + torch.tensor([[0.3, 0.4], [0.0, 0.0], [0.0, 0.1]])
    assert row_errors(expected, got).tolist() == pytest.approx([0.1, 0.0, 0.01], rel=1e-4)


def test_a_short_row_is_measured_by_a_tenth_of_the_usual_length() -> None:
    expected = torch.tensor([[10.0], [10.0], [0.001]])
    assert row_errors(expected, expected + 0.01)[2] == pytest.approx(0.01)
    assert row_errors(expected[2:], expected[2:] + 0.01, usual=10.0)[0] == pytest.approx(0.01)
    assert row_errors(expected[2:], expected[2:] + 0.01)[0] == pytest.approx(10.0)


def test_what_is_infinite_in_both_is_equal_and_anything_else_that_is_not_finite_is_not() -> None:
    row = torch.tensor([[1.0, -math.inf], [1.0, 2.0], [1.0, math.nan]])
    assert row_errors(row, row).tolist() == [0, 0, 0]
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):  # also without NaN, bit for bit
        errors = row_errors(row[:2].to(dtype), row[:2].to(dtype).clone())
        assert errors.tolist() == [0, 0] and errors.dtype == wide
    for wrong in (math.nan, math.inf):
        got = row.clone()
        got[1, 0] = wrong
        assert row_errors(row, got).tolist() == [0, math.inf, 0]


def test_whole_numbers_and_truth_values_are_equal_or_not() -> None:
    ids = torch.tensor([[1, 2], [3, 4]])
    assert row_errors(ids, ids + torch.tensor([[0, 0], [0, 1]])).tolist() == [0, math.inf]
    assert row_errors(ids[:, 0], ids[:, 1]).tolist() == [math.inf, math.inf]
    assert row_errors(ids > 1, ids > 1).tolist() == [0, 0]


def test_complex_rows() -> None:
    rows = torch.tensor([[3 + 4j], [1 + 0j]])
    assert row_errors(rows, rows * 1.01).tolist() == pytest.approx([0.01, 0.01], rel=1e-4)


def test_nothing_has_no_error() -> None:
    none = row_errors(torch.zeros(0, 3), torch.zeros(0, 3))
    assert none.shape == (0,) and worst(none) == typical(none) == 0.0


def test_rounding_is_that_of_the_coarsest_floating_type() -> None:
    assert rounding(torch.float32, torch.bfloat16, torch.int64) == ROUNDING[torch.bfloat16] == 2**-9
    assert rounding(torch.int64) == ROUNDING[torch.float32]
    assert rounding(torch.float8_e4m3fn) == 2**-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_rounding_of_random_rows_is_less_than_what_is_said_of_it(dtype: torch.dtype) -> None:
    rows = torch.randn(64, 512, dtype=torch.float64)
    assert 0 < worst(row_errors(rows, rows.to(dtype).double())) <= rounding(dtype)


def test_whole_models_in_16_bits_may_differ_in_a_few_rows() -> None:
    expected = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    few, all_rows = expected.clone(), 1.1 * expected
    few[3] *= -1
    for narrow, passes in ((torch.float32, False), (torch.bfloat16, True)):
        error, limit = logits_apart(expected, few, narrow)
        assert (error <= limit) is passes
        error, limit = logits_apart(expected, all_rows, narrow)
        assert error > limit
