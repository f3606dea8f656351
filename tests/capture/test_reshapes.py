"""Reshapes whose number of rows is a symbol: torch's elements, and no kernel of their own behind a norm of heads."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import View
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from paged_attn.capture.inductor.reshapes import rows_set_aside
from tests.capture.gpu_code import kernels_for_gpu


def head_norm(core: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Qwen3-Next's: heads [T, 32, 128] are folded into rows, normed, gated, and unfolded for the product behind."""
    heads = core.reshape(-1, 128).float()
    normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (normed * F.silu(gate.reshape(-1, 128).float())).to(torch.bfloat16).reshape(core.shape[0], -1)


def test_a_norm_of_heads_and_its_gate_are_one_kernel() -> None:
    def kernels() -> int:
        return kernels_for_gpu(head_norm, (6, 32, 128), (6, 4096)).count("@triton_heuristics.")

    assert kernels() == 2
    with rows_set_aside():
        assert kernels() == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("4T", 8), ("T", 32)),
        (("T", 4, 8), ("4T", 8)),
        ((1, "T", 32), ("4T", 8)),
        (("4T", 8), (1, "T", 2, 16)),
        (("6T", 4), ("3T", 8)),
        (("2T", 3, 4), ("3T", 8)),
        (("T", 6), ("T", 2, 3)),
    ],
)
def test_elements_stay_what_they_are(old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
    environment = ShapeEnv()
    rows = environment.create_symbol(5, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)

    def sizes(shape: tuple[Any, ...], many: Any) -> list[Any]:
        return [many * int(each[:-1] or 1) if isinstance(each, str) else sympy.Integer(each) for each in shape]

    with V.set_graph_handler(GraphLowering(fx.symbolic_trace(nn.Identity()), shape_env=environment)), rows_set_aside():
        reindex = View.dynamic_reshape_indexer(sizes(old, rows), sizes(new, rows))
    old_shape, new_shape = ([int(size) for size in sizes(shape, sympy.Integer(3))] for shape in (old, new))
    numbers = torch.arange(int(torch.tensor(old_shape).prod())).view(old_shape)
    expected = numbers.view(new_shape)
    for index in itertools.product(*map(range, new_shape)):
        found = reindex([sympy.Integer(each) for each in index])
        assert numbers[tuple(int(sympy.sympify(each).subs(rows, 3)) for each in found)] == expected[index]
