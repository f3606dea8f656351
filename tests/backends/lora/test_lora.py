"""The kernels beside the adapters one by one: few rows and many, mixed adapters and none, several parts, odd sizes; and the op itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.attn_ops.ops.linears.lora import LORA, LORA_UP, lora_one_by_one, lora_up_one_by_one

pytest.importorskip("triton")
from paged_attn.backends.lora import on_gpu
from paged_attn.backends.lora.on_gpu import NEVER, LoraTiling, UpTiling, _launches, _splits, lora_on_gpu, lora_up_on_gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operands(
    count: int, rows: tuple[int, ...] = (24, 8), *, length: int = 40, rank: int = 5, adapters: int = 3, dtype: torch.dtype = torch.float32,
    slots: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    numbers = torch.Generator().manual_seed(count)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=numbers).to(DEVICE, dtype)

    chosen = torch.randint(-1, adapters, (count,), generator=numbers) if slots is None else torch.tensor(slots)
    a, b = random(adapters, len(rows) * rank, length), random(adapters, sum(rows), rank)
    scales = torch.rand(adapters, len(rows), generator=numbers).to(DEVICE) + 0.5
    return random(1, count, sum(rows)), random(1, count, length), a, b, scales, chosen.to(DEVICE, torch.int32), list(rows)


def by_row(y: Any, x: Any, a: Any, b: Any, scales: Any, slots: Any, rows: Any) -> torch.Tensor:
    """The formula, in float64."""
    out, rank = y.double().clone(), b.shape[2]
    for row, slot in enumerate(slots.tolist()):
        start = 0
        for part, outputs in enumerate(rows if slot >= 0 else ()):
            inner = a[slot, part * rank : (part + 1) * rank].double() @ x[0, row].double()
            out[0, row, start : start + outputs] += scales[slot, part].double() * (b[slot, start : start + outputs].double() @ inner)
            start += outputs
    return out


def close(given: Any, expected: torch.Tensor, limit: float = 1e-5) -> bool:
    return bool((given.double() - expected).norm() <= limit * expected.norm())


@pytest.mark.parametrize("count", [1, 2, 17, 40])
@pytest.mark.parametrize("rows", [(24, 8), (16,), (7, 33, 5)])
def test_mixed_adapters(count: int, rows: tuple[int, ...]) -> None:
    given = operands(count, rows)
    expected = by_row(*given)
    assert close(lora_one_by_one(*given), expected)
    assert close(lora_on_gpu(*given), expected)
    for each in (False, True):
        assert close(lora_on_gpu(*given, tiling=LoraTiling(32, 16, 16, each=each)), expected)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("rows", [(16,), (32, 16), (32, 16, 7), (16, 16, 16, 16)])
def test_parts_that_blocks_of_outputs_fit(rows: tuple[int, ...], each: bool) -> None:
    given = operands(20, rows)
    assert close(lora_on_gpu(*given, tiling=LoraTiling(16, 16, 16, each=each)), by_row(*given))


def test_parts_share_a_launch_where_no_block_lies_in_two() -> None:
    assert _launches([4096, 1024, 1024], 128) == [(0, 6144, 4096, 5120)]
    assert _launches([128, 7], 128) == [(0, 135, 128, NEVER)] and _launches([40], 128) == [(0, 40, NEVER, NEVER)]
    assert _launches([7, 128], 128) == [(0, 7, NEVER, NEVER), (1, 128, NEVER, NEVER)]
    assert len(_launches([128] * 4, 128)) == 4


@pytest.mark.parametrize("slots", [[-1] * 20, [2] * 20, [0] * 10 + [-1] * 3 + [2] * 7])
def test_none_one_and_runs(slots: list[int]) -> None:
    given = operands(20, slots=slots)
    result = lora_on_gpu(*given)
    assert close(result, by_row(*given))
    none = torch.tensor(slots) < 0
    assert torch.equal(result[0].cpu()[none], given[0][0].cpu()[none])  # to the bit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype: torch.dtype) -> None:
    given = operands(20, dtype=dtype)
    kernels = [] if DEVICE == "cpu" and dtype == torch.bfloat16 else [lora_on_gpu]  # Triton's interpreter multiplies bits of bfloat16
    for run in (lora_one_by_one, *kernels):
        result = run(*given)
        assert result.dtype == dtype and close(result, by_row(*given), 2 * torch.finfo(dtype).eps)


def in_turn(*given: Any) -> torch.Tensor | None:
    return lora_on_gpu(*given, tiling=LoraTiling(16, each=False))


@pytest.mark.parametrize("run", [lora_one_by_one, lora_on_gpu, in_turn])
def test_rows_reach_nobody_else(run: Any) -> None:
    y, x, a, b, scales, slots, rows = operands(20, slots=[0, 1, -1, 2] * 5)
    expected = by_row(y, x, a, b, scales, slots, rows)
    x[0, 1::4] = a[1] = b[1] = scales[1] = float("nan")
    x[0, 2::4] = float("nan")
    result, kept = run(y, x, a, b, scales, slots, rows), (slots != 1).cpu()
    assert close(result[0].cpu()[kept], expected[0].cpu()[kept])
    assert result[0].cpu()[~kept].isnan().all()


def test_rows_further_apart() -> None:
    y, x, *more = operands(9)
    wide_y, wide_x = (torch.full((1, 9, 80), float("nan"), device=DEVICE) for _ in range(2))
    wide_y[..., : y.shape[2]], wide_x[..., : x.shape[2]] = y, x
    for run in (lora_one_by_one, lora_on_gpu, in_turn):
        assert close(run(wide_y[..., : y.shape[2]], wide_x[..., : x.shape[2]], *more), by_row(y, x, *more))


def test_what_no_kernel_serves() -> None:
    assert lora_on_gpu(*operands(3, dtype=torch.float64)) is None
    assert [_splits(products, 16) for products in (1, 16, 100, 400, 9999)] == [16, 16, 8, 2, 1]


def test_the_op() -> None:
    given = operands(6)
    assert torch.equal(LORA(*given), lora_one_by_one(*given) if DEVICE == "cpu" else LORA(*given))
    torch.library.opcheck(LORA, given)


def behind(y: Any, x: Any, a: Any, b: Any, scales: Any, slots: Any, rows: Any) -> tuple[Any, ...]:
    """The operands of `lora_up`: products with all of a behind y."""
    return torch.cat([y, x @ a.flatten(0, 1).T], -1), b, scales, slots, rows


@pytest.mark.parametrize("count", [1, 17, 40])
@pytest.mark.parametrize("rows", [(24, 8), (16,), (7, 33, 5), (16, 16, 16, 16)])
def test_products_with_a_behind_those_of_the_layer(count: int, rows: tuple[int, ...]) -> None:
    given = operands(count, rows)
    expected, more = by_row(*given), behind(*given)
    assert close(lora_up_one_by_one(*more), expected)
    assert close(lora_up_on_gpu(*more), expected)
    for together in (False, True):
        assert close(lora_up_on_gpu(*more, tiling=UpTiling(16, 16, together)), expected)


@pytest.mark.parametrize(("adapters", "rank"), [(1, 4), (9, 16), (40, 7)])
def test_ranks_of_all_adapters_in_one_product_or_several(adapters: int, rank: int) -> None:
    given = operands(21, (16, 24), adapters=adapters, rank=rank)
    assert close(lora_up_on_gpu(*behind(*given)), by_row(*given))


@pytest.mark.parametrize("count", [1, 2, 140])
def test_ranks_of_one_adapter_in_several_products(count: int) -> None:
    given = operands(count, (16, 24), rank=130, adapters=2)
    for run, more in ((lora_up_on_gpu, behind(*given)), (lora_on_gpu, given)):
        assert close(run(*more), by_row(*given))


def test_many_adapters_of_a_large_vocabulary_fit_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes 65,535 in the second and third dimension."""
    grids: list[tuple[int, ...]] = []
    for name in ("_fast_shrink", "_fast_expand"):
        monkeypatch.setattr(on_gpu, name, lambda _, grid, *__: grids.append(grid))
    vocabulary, adapters, rank = 262_208, 64, 64
    b = torch.empty(1).expand(adapters, vocabulary, rank)
    lora_on_gpu(
        torch.empty(2, vocabulary), torch.empty(2, 64), torch.empty(adapters, rank, 64), b, torch.empty(adapters, 1),
        torch.zeros(2, dtype=torch.int32), [vocabulary],
    )  # fmt: skip
    assert len(grids) == 2 and all(size <= 65_535 for grid in grids for size in grid[1:])


def test_products_of_others_reach_nobody() -> None:
    given = operands(20, slots=[0, 1, -1, 2] * 5)
    expected, (y, b, scales, slots, rows) = by_row(*given), behind(*given)
    own = torch.arange(3, device=DEVICE).repeat_interleave(10) == slots[:, None]
    y[0, :, 32:] = torch.where(own, y[0, :, 32:], float("nan"))
    for run in (lora_up_one_by_one, lora_up_on_gpu):
        assert close(run(y, b, scales, slots, rows), expected)
    assert lora_up_on_gpu(y.double(), b.double(), scales, slots, rows) is None


def test_the_other_op() -> None:
    given = behind(*operands(6))
    assert close(LORA_UP(*given), by_row(*operands(6)))
    torch.library.opcheck(LORA_UP, given)
