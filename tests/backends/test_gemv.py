"""The kernel for a single row against float64, and the op around it for any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paged_attn.attn_ops.ops.linears.linear import LINEAR
from paged_attn.backends.linear.gemv import fits, one_row_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("count", "length"), [(1, 1), (7, 48), (64, 64), (33, 100), (5, 1000), (3, 4097), (9, 2880), (5, 9000)])
def test_kernel(dtype: torch.dtype, biased: bool, count: int, length: int) -> None:
    x, weight = numbers(1, 1, length, dtype=dtype), numbers(count, length, dtype=dtype)
    bias = numbers(count, dtype=dtype) if biased else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = one_row_linear(x, weight, bias)
    assert got is not None and got.shape == (1, 1, count) and got.dtype == dtype
    rounded, summed = torch.finfo(dtype).eps * expected.abs().max(), 1e-6 * length**0.5
    assert (got.double() - expected).abs().max() <= rounded + summed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [True, False])
def test_a_result_in_float32_of_16_bits(dtype: torch.dtype, biased: bool) -> None:
    """After the same in 16 bits: another dtype of result, or of bias, is another kernel."""
    x, weight, bias = numbers(1, 1, 100, dtype=dtype), numbers(33, 100, dtype=dtype), numbers(33) if biased else None
    expected = F.linear(x.float(), weight.float(), bias)
    assert one_row_linear(x, weight, None if bias is None else bias.to(dtype)).dtype == dtype
    got = one_row_linear(x, weight, bias, torch.float32)
    assert got is not None and got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_rows_of_a_wider_weight() -> None:
    """A slice of a merged weight: rows further apart than they are long, and NaN between them."""
    wide = torch.full((12, 40), float("nan"), device=DEVICE)
    wide[:, :32] = numbers(12, 32)
    x = numbers(1, 32)
    torch.testing.assert_close(one_row_linear(x, wide[:, :32], None), F.linear(x, wide[:, :32]))


@pytest.mark.parametrize(
    ("weight", "served"),
    [
        (torch.empty(4, 20480, dtype=torch.bfloat16), True),
        (torch.empty(4, 20481, dtype=torch.bfloat16), False),
        (torch.empty(4, 10240), True),
        (torch.empty(4, 10241), False),
        (torch.empty(4, 64, dtype=torch.float64), False),
        (torch.empty(4, 64, dtype=torch.float8_e4m3fn), False),
        (torch.empty(4, 64, dtype=torch.int32), False),
        (torch.empty(64, 4).t(), False),
    ],
)
def test_what_the_kernel_serves(weight: torch.Tensor, served: bool) -> None:
    x = torch.empty(1, weight.shape[1], dtype=weight.dtype)
    assert fits(x, weight) == served
    assert served or one_row_linear(x, weight, None) is None


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("biased", [True, False])
def test_the_op_is_a_linear(rows: int, biased: bool) -> None:
    x, weight, bias = numbers(1, rows, 16), numbers(8, 16), numbers(8) if biased else None
    assert torch.equal(LINEAR(x, weight, bias), F.linear(x, weight, bias))
    torch.library.opcheck(LINEAR, (x, weight, bias), test_utils=("test_schema", "test_faketensor"))
