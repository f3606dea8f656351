"""Compile the kernels of latent attention for SM90 without a GPU; prints a line of JSON per variant, with the bytes of shared memory and,
per thread, of registers' spills. Run by test_triton_compile in a process of its own, because a process of the tests runs Triton's
interpreter."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.backends.attention.triton.latent.attend_kernel import attend_latent
from paged_attn.backends.attention.triton.latent.launch import LatentLaunch
from paged_attn.backends.attention.triton.latent.merge_kernel import merge_latent
from paged_attn.backends.attention.triton.tiling import Machine, tiling
from paged_attn.backends.attention.triton.work_partition import PartitionKind
from paged_attn.backends.kv_write.latent_kernel import store_latent_kernel
from tests.backends.kernel_resources import resources_of

TYPED = {"query", "rows", "out", "lse", "latent", "rotated", "mapped"}
INTEGERS = {"page_table", "seq_lens", "query_start", "work"}
SIZES = ((512, 64), (256, 32), (256, 64), (128, 32), (512, 0), (96, 24), (512, 128))
VARIANTS = {f"{rank} + {rotated}, {heads} heads, {rows}": (rank, rotated, heads, rows, torch.bfloat16)
            for rank, rotated in SIZES for heads, rows in ((16, "one"), (20, "one"), (128, "one"), (16, "more"), (16, "all"))}  # fmt: skip
VARIANTS["float32"] = (512, 64, 16, "one", torch.float32)


def compiled(rank: int, rotated: int, heads: int, rows: Any, dtype: torch.dtype) -> dict[str, Any]:
    rows_of = HeadRows(0, 256)
    spec = LatentSpec(heads, 1, rank + rotated, rank, 0.1, rotated=rotated, key_dim=128, value_dim=128, keys=rows_of, values=rows_of)
    tiles = tiling(rows, spec, dtype, 1 if rows == "one" else 8, 9000, 9000, Machine(132, hopper=True, early=True))
    launch = LatentLaunch.of(KVPool([spec], 2, 16, dtype), 0, PartitionKind.of(spec, rows, tiles))
    word = "bf16" if dtype == torch.bfloat16 else "fp32"
    extra = {"HAS_LSE": False, "PRECISION": "tf32" if word == "bf16" else "ieee"}
    attend = _compile(attend_latent, launch.constants | extra, word, launch.options)
    merge = _compile(merge_latent, launch.merge_constants | {"HAS_LSE": False}, word, {"num_warps": 4})
    sizes = {"HEADS": heads, "RANK": rank, "ROTATED": rotated, "PAGE_SIZE": 16}
    blocks = {"BLOCK_H": 16, "BLOCK_R": triton.next_power_of_2(rank), "BLOCK_E": triton.next_power_of_2(max(rotated, 1))}
    store = _compile(store_latent_kernel, sizes | blocks, word, {"num_warps": 2})
    return {"shared": attend["shared"] * tiles.programs_per_sm, "spilled": attend["spilled"], "merge_spilled": merge["spilled"],
            "store_spilled": store["spilled"], "registers": attend["registers"] * tiles.warps * 32 * tiles.programs_per_sm}  # fmt: skip


def _compile(kernel: Any, constants: dict[str, Any], word: str, options: dict[str, Any]) -> dict[str, int]:
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = f"*{word}" if name in TYPED else "*i32" if name in INTEGERS else "*fp32" if name.startswith("partial") else None
        pointer = "*i64" if name == "slots" else pointer
        signature[name] = pointer or ("fp32" if name == "scale" else "i32")
        if pointer or (name.endswith("stride") and name != "table_stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {name: constants[name] for name in constants if name in kernel.arg_names}, attributes)
    return resources_of(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


if __name__ == "__main__":
    for name, variant in VARIANTS.items():
        print(json.dumps({"variant": name, **compiled(*variant)}), flush=True)
