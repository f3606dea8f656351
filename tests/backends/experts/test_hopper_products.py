"""The products of experts for Hopper, their threads, barriers and copies on the CPU (`gluon_on_cpu`), against the float32 reference."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from paged_attn.backends.compiling.compile_job import Boxes
from paged_attn.backends.experts.triton import grouped, hopper
from paged_attn.backends.machine import Machine
from tests.backends.experts.operands import DEVICE, GATINGS, close, in_float32, operands, with_loads
from tests.backends.gluon_on_cpu import Described, on_cpu

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu/test_hopper_experts.py runs them for real")
EXPERTS, ATTENTION = "paged_attn.backends.experts.triton.", "paged_attn.backends.attention.triton."
OWN = (EXPERTS + "hopper_kernel", EXPERTS + "gate", ATTENTION + "hopper", ATTENTION + "tiles")
SIZES: dict[str, Any] = {"hidden": 128, "width": 320, "dtype": torch.bfloat16}
PROGRAMS = 3


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grids that were launched."""
    product, grids = on_cpu(EXPERTS + "hopper_kernel", "product_hopper", OWN), list[tuple[int, ...]]()

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, **constants: Any) -> None:
        grids.append(grid)
        product(None, (*grid, 1), [_described(each) if isinstance(each, Boxes) else each for each in arguments], constants, None, -1)

    monkeypatch.setitem(sys.modules, EXPERTS + "hopper_kernel", SimpleNamespace(product_hopper=None))  # type: ignore[misc]
    monkeypatch.setattr(hopper, "launch", launch)
    monkeypatch.setattr(hopper, "machine_of", lambda device: Machine(PROGRAMS, hopper=True, early=False))
    monkeypatch.setattr(hopper, "FEWEST_PAIRS", 0)
    return grids


def _described(boxes: Boxes) -> Described:
    matrix = boxes.tensor.as_strided(boxes.shape, (boxes.stride, 1), boxes.tensor.storage_offset())
    return Described(matrix, (boxes.box[0], boxes.box[1]))


@pytest.mark.parametrize("name", ("silu", "interleaved, clamped, alpha", "relu2 without a gate"))
@pytest.mark.parametrize("layout", ("rows", "transposed", "apart"))
def test_every_layout(name: str, layout: str, on_hopper: list[tuple[int, ...]]) -> None:
    gating = GATINGS[name]
    if layout == "apart" and (gating.interleaved or not gating.gated):
        pytest.skip("gates and ups that take turns lie together")
    given = operands(50, gating, bias=True, transposed=layout == "transposed", apart=layout == "apart", **SIZES)
    if layout == "transposed" and name == "silu":  # the general kernels', which the interpreter does not run in bfloat16
        x, _, _, *others = given
        assert hopper.hopper_products(x, *others, 16.0) is None
        return
    result = grouped.grouped_experts(*given)
    assert close(result, in_float32(given), 0.01) and on_hopper == [(PROGRAMS,), (PROGRAMS,)]


@pytest.mark.parametrize("loads", ((0, 1, 63, 64, 65, 127), (128, 129, 0, 0, 191, 2), (0, 300, 0, 0, 0, 0)))
def test_every_load(loads: tuple[int, ...], on_hopper: list[tuple[int, ...]]) -> None:
    """Experts without pairs, with one, with less and more than a consumer's and a tile's; ids that no expert has."""
    given = with_loads(loads, **SIZES | {"width": 64})
    result = grouped.grouped_experts(*given)
    assert on_hopper == [(PROGRAMS,), (PROGRAMS,)]
    assert close(result, in_float32(given), 0.01) and not result[(given[1] == len(loads))[:, 0]].any()
