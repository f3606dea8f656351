"""Linears of few rows in Triton's interpreter against float64; tests/gpu/test_skinny_linear.py has bfloat16 and the real thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops import linear_op
from paged_attn.attn_ops.linear_op import LINEAR, set_few_row_linear

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
if not torch.cuda.is_available():
    from paged_attn.backends.triton import skinny_linear as module
    from paged_attn.backends.triton.skinny_linear import SkinnyConfig, skinny_linear

    SMALL = SkinnyConfig(block_n=16, block_k=32)  # three multiprocessors in the interpreter, so six programs


def problem(rows: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).half() for shape in ((rows, k), (n, k), (n,)))  # type: ignore[return-value]


def agree(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Exact but for the rounding to float16 and that of sums in float32."""
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert y.dtype == x.dtype and y.shape == expected.shape
    torch.testing.assert_close(y.double(), expected, rtol=6e-4, atol=1e-4)


def workspace() -> module._Workspace:
    return module._workspaces[-1]


@pytest.fixture(autouse=True)
def counters_are_zero_after_each_test() -> Iterator[None]:
    yield
    if not torch.cuda.is_available() and -1 in module._workspaces:
        assert not workspace().counters.any()


@pytest.mark.parametrize("rows", range(1, 17))
def test_every_number_of_rows(rows: int) -> None:
    x, weight, bias = problem(rows, 80, 160)
    agree(skinny_linear(x, weight, config=SMALL), x, weight)
    agree(skinny_linear(x, weight, bias, config=replace(SMALL, weight_left=False)), x, weight, bias)


@pytest.mark.parametrize(("n", "k"), [(16, 16), (48, 80), (33, 31), (1, 16), (200, 48), (7, 1), (16, 960), (96, 32)])
@pytest.mark.parametrize("weight_left", [True, False])
def test_sizes_that_fill_no_block(n: int, k: int, weight_left: bool) -> None:
    x, weight, bias = problem(3, n, k)
    agree(skinny_linear(x, weight, bias, config=replace(SMALL, weight_left=weight_left)), x, weight, bias)


@pytest.mark.parametrize("programs_per_sm", [1, 2, 3, 5, 7, 20])
@pytest.mark.parametrize(("n", "k"), [(112, 352), (16, 1216), (64, 64)])
def test_cuts_anywhere(programs_per_sm: int, n: int, k: int) -> None:
    """Tiles within a program, tiles in two to many parts, and programs that begin and end within one tile."""
    x, weight, bias = problem(5, n, k)
    config = replace(SMALL, programs_per_sm=programs_per_sm)
    first = skinny_linear(x, weight, bias, config=config)
    agree(first, x, weight, bias)
    for _ in range(2):
        assert torch.equal(skinny_linear(x, weight, bias, config=config), first)


@pytest.mark.parametrize("programs_per_sm", [1, 2, 5])
def test_whole_tiles(programs_per_sm: int) -> None:
    x, weight, bias = problem(5, 150, 352)
    config = replace(SMALL, programs_per_sm=programs_per_sm, whole=True)
    agree(skinny_linear(x, weight, bias, config=config), x, weight, bias)


def test_what_lies_past_the_end_is_not_read() -> None:
    """Neither past K nor past the last row of x or weight."""
    x, weight, _ = problem(3, 40, 72)
    wide = torch.full((16, 104), float("nan"), dtype=torch.float16)
    wide[:3, :72] = x
    tall = torch.full((64, 72), float("nan"), dtype=torch.float16)
    tall[:40] = weight
    agree(skinny_linear(wide[:3, :72], tall[:40], config=SMALL), x, weight)


def test_forms_of_x() -> None:
    x, weight, bias = problem(4, 48, 64)
    assert skinny_linear(x[None], weight, bias).shape == (1, 4, 48)
    agree(skinny_linear(x[None], weight, bias)[0], x, weight, bias)
    agree(skinny_linear(x.t().contiguous().t(), weight, bias), x, weight, bias)
    agree(skinny_linear(x[:1].expand(4, -1), weight, bias), x[:1].expand(4, -1), weight, bias)
    assert skinny_linear(x[:0], weight).shape == (0, 48)


def test_configs_in_turn_share_a_workspace() -> None:
    """It grows; what it was before stays, as a captured graph has its address."""
    small, large = problem(2, 64, 128), problem(16, 200, 4096)
    agree(skinny_linear(*small, config=SMALL), *small)
    before = workspace().partial
    huge = replace(SMALL, block_n=128, programs_per_sm=120)
    agree(skinny_linear(*large, config=huge), *large)
    assert workspace().partial is not before and any(kept is before for kept in workspace()._outgrown)
    agree(skinny_linear(*small, config=SMALL), *small)


def test_refusals_say_what_was_given() -> None:
    x, weight, bias = problem(4, 48, 64)
    for wrong in ((x.float(), weight), (x, weight.float()), (x, weight.t().contiguous().t()), (x, weight, bias.float()), (x[:, :48], weight),
                  (x.repeat(5, 1), weight), (x, weight, bias[:16])):  # fmt: skip
        with pytest.raises(ValueError, match=r"at most 16 rows, one 16-bit dtype"):
            skinny_linear(*wrong)
    with pytest.raises(ValueError, match=r"x has shape \[2, 2, 64\]"):
        skinny_linear(x.view(2, 2, 64), weight)


def test_the_op_is_linear() -> None:
    x, weight, bias = problem(4, 48, 64)
    assert torch.equal(LINEAR(x, weight, bias), F.linear(x, weight, bias))
    torch.library.opcheck(LINEAR, (x[None], weight, None), test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(RuntimeError):
        LINEAR(x[:, :48], weight)


def test_the_op_takes_the_kernel_for_few_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def mark(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        calls.append(tuple(x.shape))
        return F.linear(x, weight, bias)

    class OnCuda(Tensor):
        is_cuda = True  # type: ignore[assignment]

    monkeypatch.setattr(linear_op, "_few_row_linear", None)
    weight = torch.randn(32, 16).half()
    set_few_row_linear(mark)
    for shape in ((2, 16), (16, 16), (17, 16), (1, 3, 16), (2, 3, 16), (0, 16), (1, 40, 16)):
        x = torch.randn(shape).half().as_subclass(OnCuda)
        linear_op._run(x, weight)
    linear_op._run(torch.randn(2, 16).as_subclass(OnCuda), weight.float())
    linear_op._run(torch.randn(2, 32).half().as_subclass(OnCuda), weight.t())
    linear_op._run(torch.randn(2, 16).half(), weight)
    assert calls == [(2, 16), (16, 16), (1, 3, 16)]


@pytest.mark.slow
def test_compiles_for_sm90_pipelined() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.compile_skinny_linear"]
    result = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) > 5
    for row in rows:
        assert row["cubin"] > 0 and row["spilled"] == 0 and row["shared"] <= 227 * 1024, row
        assert row["async_copies"] > 0 and row["waits"] == (2 if row["early"] else 0), row
        assert (row["prefetches"] > 0) is row["early"], row
