"""The products of experts for Hopper: gates, layouts and loads of every kind, beside the float32 reference and the general kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.experts.triton import grouped, hopper
from paged_attn.backends.machine import machine_of
from tests.backends.experts.operands import GATINGS, close, in_float32, operands, with_loads

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and machine_of(torch.device("cuda")).hopper), reason="no Hopper GPU, or another Triton"
)
SIZES: dict[str, Any] = {"hidden": 192, "width": 320, "dtype": torch.bfloat16}  # no multiples of a tile's 128 and 256 columns


def both(given: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, taken: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """What the layer makes of its tokens, and what the general kernels make of them."""
    x, ids, _, w1, w2, b1, b2, gating = given
    products = hopper.hopper_products(x, w1, w2, b1, b2, gating, ids.numel() / len(w1))
    assert (products is not None) == taken
    result = grouped.grouped_experts(*given)
    monkeypatch.setattr(grouped, "hopper_products", lambda *arguments: None)
    return result, grouped.grouped_experts(*given)


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("layout", ("rows", "transposed", "apart"))
@pytest.mark.parametrize("name", GATINGS)
def test_every_gate_and_layout(name: str, layout: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gating = GATINGS[name]
    if layout == "apart" and (gating.interleaved or not gating.gated):
        pytest.skip("gates and ups that take turns lie together")
    given = operands(500, gating, bias=bias, transposed=layout == "transposed", apart=layout == "apart", **SIZES)
    taken = layout != "transposed" or gating.interleaved or not gating.gated
    ours, general = both(given, monkeypatch, taken)
    assert close(ours, in_float32(given), 0.01) and close(ours, general, 0.002)


def test_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(500, Gating(), **SIZES | {"dtype": torch.float16})
    ours, general = both(given, monkeypatch)
    assert close(ours, in_float32(given), 0.002) and close(ours, general, 0.002)


@pytest.mark.parametrize("loads", ((0, 1, 63, 64, 65, 127), (128, 129, 0, 0, 191, 192), (0, 1000, 0, 0, 0, 0), (300, 1, 1, 1, 1, 1)))
def test_every_load(loads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts without pairs, with one, with less and more than a consumer's and a tile's; ids that no expert has."""
    given = with_loads(loads, **SIZES)
    ours, general = both(given, monkeypatch)
    assert close(ours, in_float32(given), 0.01) and close(ours, general, 0.002)
    assert not ours[(given[1] == len(loads))[:, 0]].any()


def test_rows_of_a_wider_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    x, *others = operands(500, Gating(), **SIZES)
    wide = torch.cat((x, torch.full_like(x, torch.nan)), 1)[:, : x.shape[1]]
    ours, general = both((wide, *others), monkeypatch)
    assert close(ours, in_float32((x, *others)), 0.01) and close(ours, general, 0.002)


def test_the_same_again() -> None:
    given = operands(2000, Gating(), experts=32, top_k=4, **SIZES | {"hidden": 1024})
    first = grouped.grouped_experts(*given)
    for _ in range(20):
        assert torch.equal(grouped.grouped_experts(*given), first)
