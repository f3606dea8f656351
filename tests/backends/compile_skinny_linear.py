"""Compile the kernel for linears of few rows for SM90 without a GPU; prints a line of JSON per config. Run by test_skinny_linear."""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_attn.backends.triton.skinny_kernel import skinny_linear_kernel
from paged_attn.backends.triton.skinny_linear import SkinnyConfig, config_of

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
ODD = (4000, 4104)
POINTERS = {"partial": "*fp32", "counters": "*i32"}


def compiled(config: SkinnyConfig, n: int, k: int, rows: int, dtype: str = "bf16", bias: bool = False) -> Any:
    constants = config.constants(n, k, rows, 132, config.early, bias)
    signature, attributes = {}, {}
    for index, name in enumerate(skinny_linear_kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = "i32" if name in ("rows", "x_stride") else POINTERS.get(name, f"*{dtype}")
        if name != "rows":
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(skinny_linear_kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=config.options(config.early))


def row(config: SkinnyConfig, n: int, k: int, rows: int, dtype: str = "bf16", bias: bool = False) -> dict[str, Any]:
    result = compiled(config, n, k, rows, dtype, bias)
    ptx = result.asm["ptx"]
    return {
        "shape": [n, k], "rows": rows, "early": config.early, "shared": result.metadata.shared, "cubin": len(result.asm["cubin"]),
        "async_copies": ptx.count("cp.async.cg"), "waits": ptx.count("griddepcontrol"), "prefetches": ptx.count("prefetch.global.L2"),
        "matrix": "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "none", "spilled": ptx.count("st.local"),
    }  # fmt: skip


if __name__ == "__main__":
    for n, k in SHAPES:
        for rows in (2, 16):
            print(json.dumps(row(config_of(n, k, rows), n, k, rows)), flush=True)
    late = SkinnyConfig(weight_left=False, hints=True, early=False)
    print(json.dumps(row(SkinnyConfig(block_n=16, block_k=256, warps=2, whole=True), *SHAPES[1], 2)), flush=True)
    for dtype in ("bf16", "fp16"):
        print(json.dumps(row(late, *ODD, 8, dtype, bias=True)), flush=True)
