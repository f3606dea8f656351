"""Compile the kernels of adapters for a GPU that is named, without having it; prints a line of JSON per variant: bytes of shared memory.
Run by test_compile in a process of its own, because a process of the tests runs Triton's interpreter."""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.compiler import ASTSource

from paged_attn.backends.lora.kernels import expand_kernel, shrink_kernel
from paged_attn.backends.lora.on_gpu import LONGEST_PRODUCT, LoraTiling, UpTiling, stages_of
from paged_attn.backends.lora.up_kernel import up_kernel
from tests.backends.gpus import GPU, named

POINTERS = {"inner": "*fp32", "scales": "*fp32", "slots": "*i32", "arrived": "*i32"}
FACTORS = ("x", "a", "y", "b", "out")
# Rank, rows and dtype; not rank 1024 in float32, for which ptxas takes minutes.
VARIANTS = [
    (16, 1, "bf16"), (16, 64, "fp16"), (16, 64, "fp32"), (16, 8192, "bf16"), (128, 8, "bf16"), (128, 64, "fp32"), (128, 8192, "bf16"),
    (256, 8, "bf16"), (256, 64, "fp32"), (256, 8192, "bf16"), (1024, 8, "bf16"),
]  # fmt: skip
TIGHT = [(64, 64, "fp32"), (128, 8, "bf16"), (128, 64, "bf16"), (256, 8, "bf16")]  # with the largest blocks


def compiled(kernel: Any, kind: str, constants: dict[str, Any], stages: int, gpu: GPU) -> dict[str, Any]:
    types = POINTERS | dict.fromkeys(FACTORS, f"*{kind}")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    divisible = [
        index for index, name in enumerate(kernel.arg_names) if name not in constants and name not in ("count", "part", "start", "third")
    ]
    attributes = {(index,): [["tt.divisibility", 16]] for index in divisible}
    named = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, named, attributes)
    result = triton.compile(source, target=gpu.target, options={"num_stages": stages})
    return {"shared": result.metadata.shared, "waits": "griddepcontrol.wait" in result.asm["ptx"], "has_dot": "mma" in result.asm["ptx"]}


def main() -> None:
    gpu = named()
    for rank, count, kind in VARIANTS if gpu.machine.hopper else TIGHT:
        tiling, up, block = LoraTiling.of(count, rank, 4 if kind == "fp32" else 2, gpu.shared_bytes), UpTiling.of(count), max(rank, 16)
        common = {"RANK": rank, "PARTS": 3, "PRECISION": "ieee" if kind == "fp32" else "tf32", "EARLY": gpu.machine.early}
        down = {"BLOCK_K": tiling.columns, "SPLITS": 1 if count == 8192 else 16}
        tiles = {"BLOCK_N": tiling.outputs, "TILES": 48}
        blocks = {"BLOCK_M": tiling.rows, "BLOCK_R": block, "EACH": tiling.each}
        alone = {
            "ADAPTERS": 8 if rank <= 128 else 2, "BLOCK_M": up.rows, "BLOCK_N": up.outputs, "TOGETHER": up.together,
            "BLOCK_K": LONGEST_PRODUCT if up.together else min(block, LONGEST_PRODUCT),
        }  # fmt: skip
        for kernel, constants in ((shrink_kernel, blocks | down), (expand_kernel, blocks | tiles), (up_kernel, alone)):
            found = compiled(kernel, kind, common | constants, stages_of(rank), gpu)
            print(json.dumps({"kernel": kernel.__name__, "rank": rank, "count": count, "kind": kind, **found}), flush=True)


if __name__ == "__main__":
    main()
