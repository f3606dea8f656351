"""Compiles the products of experts for Hopper without a GPU; prints a line of JSON per variant, with the bytes of shared memory and of a
thread's spilled registers. Run by test_hopper_matrix in a process of its own, because a process of the tests runs Triton's interpreter."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from paged_attn.backends.experts.triton import hopper
from paged_attn.backends.experts.triton import hopper_kernel as kernel
from paged_attn.backends.machine import Machine
from tests.backends.experts.operands import GATINGS, operands
from tests.backends.kernel_resources import resources_of

FLOATS = {"left", "bias", "scales", "out"}


def compiled(product: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, **constants: Any) -> dict[str, int]:
    signature, attributes = {}, {}
    for index, (name, argument) in enumerate(zip(product.arg_names, arguments, strict=False)):
        if isinstance(argument, torch.Tensor):
            signature[name] = "*bf16" if name in FLOATS else "*i32"
        elif isinstance(argument, int):
            signature[name] = "i32"
        elif isinstance(argument, float):
            signature[name] = "fp32"
        else:
            signature[name] = f"tensordesc<bf16{argument.box},{argument.layout!r}>"
        if isinstance(argument, torch.Tensor) or name in ("left_stride", "bias_stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(product, {name: signature[name] for name in product.arg_names}, constants, attributes)
    return resources_of(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}))


def main() -> None:
    assert (2 * kernel.HALF.value, kernel.COLUMNS.value, kernel.DEPTH.value) == (hopper.BLOCK, hopper.COLUMNS, hopper.DEPTH)
    found: list[dict[str, int]] = []
    pairs, blocks = torch.empty(1000, dtype=torch.int32), torch.empty(3, 16, dtype=torch.int32)
    with (
        patch.object(hopper, "machine_of", lambda device: Machine(132, hopper=True, early=True)),
        patch.object(hopper, "launch", lambda *arguments, **constants: found.append(compiled(*arguments, **constants))),
    ):
        for name, gating in GATINGS.items():
            for transposed in (False, True) if gating.interleaved else (False,):
                given = operands(500, gating, hidden=192, width=320, bias=True, transposed=transposed, dtype=torch.bfloat16)
                x, _, weights, w1, w2, b1, b2, _ = given
                products = hopper.hopper_products(x, w1, w2, b1, b2, gating, 166.0)
                assert products is not None
                inner, parts = (torch.empty(1000, columns, dtype=torch.bfloat16) for columns in (320, 192))
                products[0](x, 2, pairs, blocks, weights, inner)
                products[1](inner, 1, pairs, blocks, weights, parts)
                word = ", transposed" if transposed else ""
                for variant, result in zip((name + word, "second" + word), found, strict=True):
                    print(json.dumps({"variant": variant, **result}), flush=True)
                found.clear()


if __name__ == "__main__":
    main()
