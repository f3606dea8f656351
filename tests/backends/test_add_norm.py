"""The kernels of a residual addition and a norm against float64, and the ops around them for any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.ops.linears.add_norm import ADD_NORM, ADD_NORM_LINEAR, rms_norm
from paged_attn.backends.linear.add_norm import add_norm, add_norm_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def off(got: Tensor, expected: Tensor) -> float:
    """The largest error, in roundings of the result's dtype."""
    limit = torch.finfo(got.dtype).eps * expected.abs().max()
    return float((got.double() - expected).abs().max() / limit)


def check_total(total: Tensor, x: Tensor, residual: Tensor) -> None:
    """A GPU rounds the sum as torch does; the interpreter rounds towards zero."""
    assert torch.equal(total, x + residual) if total.is_cuda else off(total, x.double() + residual.double()) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "length"), [(1, 48), (3, 64), (5, 100), (2, 2880)])
def test_norm(dtype: torch.dtype, offset: float, rows: int, length: int) -> None:
    x, residual, scale = (
        numbers(1, rows, length, dtype=dtype),
        numbers(1, rows, length + 1, dtype=dtype)[..., 1:],
        numbers(length, dtype=dtype),
    )
    normed, total = add_norm(x, residual, scale, EPS, offset)
    check_total(total, x, residual)
    assert normed.dtype == dtype and normed.shape == x.shape
    assert off(normed, rms_norm(total.double(), scale.double(), EPS, offset)) <= 4


def test_rows_of_slices() -> None:
    """Rows further apart than they are long, and NaN between them."""
    wide = torch.full((1, 6, 80), float("nan"), device=DEVICE)
    wide[..., :32] = numbers(1, 6, 32)
    residual, scale = numbers(1, 6, 32), numbers(32)
    normed, total = add_norm(wide[..., :32], residual, scale, EPS, 0.0)
    torch.testing.assert_close(total, wide[..., :32] + residual)
    torch.testing.assert_close(normed, rms_norm(total, scale, EPS, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("biased", "keep"), [(True, True), (False, False)])
@pytest.mark.parametrize(
    ("count", "length", "offset"), [(1, 16, 0.0), (7, 48, 1.0), (64, 64, 0.0), (33, 100, 1.0), (5, 2880, 0.0), (3, 4097, 0.0)]
)
def test_product(dtype: torch.dtype, biased: bool, keep: bool, count: int, length: int, offset: float) -> None:
    x, residual, scale = numbers(1, 1, length, dtype=dtype), numbers(1, 1, length + 3, dtype=dtype)[..., 3:], numbers(length, dtype=dtype)
    weight, bias = numbers(count, length, dtype=dtype), numbers(count, dtype=dtype) if biased else None
    out, normed, total = add_norm_linear(x, residual, scale, EPS, offset, weight, bias, keep)
    expected = rms_norm(total.double(), scale.double(), EPS, offset)
    check_total(total, x, residual)
    assert normed.shape == (x.shape if keep else (0,))
    assert not keep or off(normed, expected) <= 4
    product = F.linear(expected, weight.double(), None if bias is None else bias.double())
    assert out.shape == (1, 1, count) and out.dtype == dtype and off(out, product) <= (16 if dtype == torch.float32 else 2)


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("keep", [True, False])
def test_ops(rows: int, keep: bool) -> None:
    """For any number of rows they compute what the model wrote, and say the same of fake tensors."""
    x, residual, scale, weight, bias = (numbers(*s) for s in ((1, rows, 24), (1, rows, 24), (24,), (10, 24), (10,)))
    given = (x, residual, scale, EPS, 1.0)
    expected = rms_norm(x + residual, scale, EPS, 1.0)
    out, normed, total = ADD_NORM_LINEAR(*given, weight, bias, keep)
    torch.testing.assert_close(out, F.linear(expected, weight, bias))
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, expected if keep else x.new_empty(0))
    torch.testing.assert_close(ADD_NORM(*given)[0], expected)
    torch.library.opcheck(ADD_NORM_LINEAR, (*given, weight, bias, keep), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(ADD_NORM, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("kind", ["float64", "two dtypes", "no order"])
def test_what_no_kernel_takes(kind: str) -> None:
    x, scale = numbers(1, 1, 32), numbers(32)
    residual = {"float64": x.double(), "two dtypes": x.bfloat16(), "no order": numbers(1, 1, 64)[..., ::2]}[kind]
    given = (x.double() if kind == "float64" else x, residual, scale, EPS, 0.0)
    assert add_norm(*given) is None and add_norm_linear(*given, numbers(4, 32), None, True) is None
