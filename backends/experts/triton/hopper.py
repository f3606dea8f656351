"""Launches the products for Hopper, where the layer's shapes and layouts allow it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.compiling.compile_ahead import launch
from paged_attn.backends.compiling.compile_job import Boxes
from paged_attn.backends.experts.triton.arguments import constants_of
from paged_attn.backends.machine import machine_of

BLOCK = 128  # pairs per tile
COLUMNS, DEPTH = 256, 64
STAGES = 4
FEWEST_PAIRS = 24  # average pairs per expert; with fewer, the general kernels' small tiles are faster
_NO_GATE = Gating("none", gated=False)


@dataclass(frozen=True)
class Matrix:
    """The weights of all experts as one matrix, for copies by TMA.

    Attributes:
        shape, stride: rows and columns, and elements from row to row.
        k_first: whether a row is one k for all columns of the product, rather than one column of the product.
        expert_rows: rows from expert to expert.
        up_rows: rows from gates to ups, if separate.
    """

    shape: tuple[int, int]
    stride: int
    k_first: bool
    expert_rows: int
    up_rows: int


def matrix_of(weight: Tensor) -> Matrix | None:
    """The matrix of a weight [E, N, K] or [E, 2, I, K]; None if TMA cannot read the start of every row."""
    *leading, columns, depth = weight.shape
    k_first = weight.stride(-1) != 1
    if k_first:
        columns, depth = depth, columns
    row, unit = (weight.stride(-1), weight.stride(-2)) if k_first else (weight.stride(-2), weight.stride(-1))
    steps = weight.stride()[:-2]
    if unit != 1 or row % 8 or weight.storage_offset() % 8 or weight.shape[-1] % DEPTH or any(step % row for step in steps):
        return None
    last = sum((size - 1) * step for size, step in zip(leading, steps, strict=True)) // row
    ups = steps[1] // row if len(steps) == 2 else weight.shape[-2] // 2
    return Matrix((last + columns, depth), row, k_first, steps[0] // row, ups)


@dataclass(frozen=True)
class Product:
    """One of a layer's two products; `gating` follows the first; None: the second, which is scaled."""

    weight: Tensor
    bias: Tensor | None
    matrix: Matrix
    gating: Gating | None

    def __call__(self, left: Tensor, top_k: int, pairs: Tensor, blocks: Tensor, scales: Tensor, out: Tensor) -> None:
        """out [T k, N], by pair, from row pair // top_k of `left`; pairs are sorted, in blocks of BLOCK."""
        from triton.experimental.gluon import language as gl

        from paged_attn.backends.experts.triton.hopper_kernel import product_hopper

        weight, matrix, gating, n = self.weight, self.matrix, self.gating or _NO_GATE, out.shape[1]
        width = COLUMNS // 2 if gating.gated else COLUMNS
        box = [DEPTH, COLUMNS] if matrix.k_first else [COLUMNS if gating.interleaved else width, DEPTH]
        layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16 if weight.dtype == torch.bfloat16 else gl.float16)
        tiles = blocks.shape[1] * triton.cdiv(n, width)
        launch(
            product_hopper, (min(tiles, machine_of(weight.device).multiprocessors),),
            left, pairs, blocks, Boxes(weight, matrix.shape, matrix.stride, box, layout), left if self.bias is None else self.bias, scales,
            out, blocks.shape[1], left.stride(0), matrix.expert_rows, matrix.up_rows, 0 if self.bias is None else self.bias.stride(0),
            gating.limit, gating.alpha, EXPERTS=len(weight), TOP_K=top_k, N=n, K=left.shape[1], K_FIRST=matrix.k_first,
            HAS_BIAS=self.bias is not None, SCALED=self.gating is None, STAGES=STAGES, num_warps=4, **constants_of(gating),
        )  # fmt: skip


def hopper_products(
    x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating, pairs_of_an_expert: float
) -> tuple[Product, Product] | None:
    """Both products, if the kernel supports them and is faster."""
    if pairs_of_an_expert <= FEWEST_PAIRS or w1.element_size() != 2 or not machine_of(w1.device).hopper:
        return None
    first, second = matrix_of(w1), matrix_of(w2)
    if first is None or second is None or x.stride(0) % 16 or x.storage_offset() % 8:
        return None
    if first.k_first and gating.gated and not gating.interleaved:  # a box would have to be split in two
        return None
    return Product(w1, b1, first, gating), Product(w2, b2, second, None)
