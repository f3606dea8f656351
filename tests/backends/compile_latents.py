"""Compile the kernels of latent attention for a GPU that is named, without having it; prints a line of JSON per variant, with the bytes of
shared memory and, per thread, of registers' spills. Run by test_triton_compile in a process of its own, because a process of the tests
runs Triton's interpreter."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.backends.attention.triton.latent.attend_kernel import attend_latent
from paged_attn.backends.attention.triton.latent.hopper_kernel import attend_latent_hopper
from paged_attn.backends.attention.triton.latent.launch import LatentLaunch
from paged_attn.backends.attention.triton.latent.merge_kernel import merge_latent
from paged_attn.backends.attention.triton.tiling import tiling
from paged_attn.backends.attention.triton.work_partition import PartitionKind
from paged_attn.backends.kv_write.kernels import store_latent_kernel
from tests.backends.gpus import named
from tests.backends.kernel_resources import resources_of

TYPED = {"query", "rows", "out", "lse", "latent", "rotated", "mapped"}
INTEGERS = {"page_table", "seq_lens", "query_start", "work"}
SIZES = ((512, 64), (256, 32), (256, 64), (128, 32), (512, 0), (96, 24), (512, 128))
ROWS = ((16, "one"), (20, "one"), (128, "one"), (16, "more"), (16, "all"))
Variant = tuple[int, int, int, str, torch.dtype, bool]
EVERY: dict[str, Variant] = {
    f"{rank} + {rotated}, {heads} heads, {rows}": (rank, rotated, heads, rows, torch.bfloat16, False)
    for rank, rotated in SIZES for heads, rows in ROWS
}  # fmt: skip
EVERY["float32"] = (512, 64, 16, "one", torch.float32, False)
EVERY |= {f"512 + 64, {heads} heads, one, on Hopper": (512, 64, heads, "one", torch.bfloat16, True) for heads in (16, 20, 128)}
ACCOUNTS = {"GROUP", "ROWS", "ITEM_COST"}  # which rows and items are whose: loops and products are the same


def launch_of(rank: int, rotated: int, heads: int, rows: Any, dtype: torch.dtype, hopper: bool) -> tuple[LatentLaunch, Any]:
    rows_of = HeadRows(0, 256)
    spec = LatentSpec(heads, 1, rank + rotated, rank, 0.1, rotated=rotated, key_dim=128, value_dim=128, keys=rows_of, values=rows_of)
    machine = replace(named().machine, hopper=hopper and named().machine.hopper)
    tiles = tiling(rows, spec, dtype, 1 if rows == "one" else 8, 9000, 9000, machine)
    return LatentLaunch.of(KVPool([spec], 2, 16, dtype), 0, PartitionKind.of(spec, rows, tiles)), tiles


def blocks_of(variant: Variant) -> str:
    launch, tiles = launch_of(*variant)
    constants = {name: value for name, value in launch.constants.items() if name not in ACCOUNTS}
    return f"{constants} {launch.options} {tiles.programs_per_sm}"


def differing(variants: dict[str, Variant]) -> dict[str, Variant]:
    """All of the first size; of the others one of those with the same blocks, the last."""
    first = {name: variant for name, variant in variants.items() if variant[:2] == SIZES[0]}
    others = {blocks_of(variant): name for name, variant in variants.items() if name not in first}
    return first | {name: variants[name] for name in others.values()}


VARIANTS = differing(EVERY)


def compiled(rank: int, rotated: int, heads: int, rows: Any, dtype: torch.dtype, hopper: bool) -> dict[str, Any]:
    launch, tiles = launch_of(rank, rotated, heads, rows, dtype, hopper)
    word = "bf16" if dtype == torch.bfloat16 else "fp32"
    extra = {"HAS_LSE": False} | ({} if tiles.hopper else {"PRECISION": "tf32" if word == "bf16" else "ieee"})
    attend = _compile(attend_latent_hopper if tiles.hopper else attend_latent, launch.constants | extra, word, launch.options)
    few = {"HAS_LSE": False, "SHARES": 1, "COLUMNS": min(128, launch.merge_constants["BLOCK_R"]), "PARTS": 32, "EARLY": False}
    merge = _compile(merge_latent, launch.merge_constants | few, word, {"num_warps": 4})
    sizes = {"HEADS": heads, "RANK": rank, "ROTATED": rotated, "PAGE_SIZE": 16}
    blocks = {"BLOCK_H": 16, "BLOCK_R": triton.next_power_of_2(rank), "BLOCK_E": triton.next_power_of_2(max(rotated, 1))}
    store = _compile(store_latent_kernel, sizes | blocks, word, {"num_warps": 2})
    taken = attend["registers"] * tiles.warps * 32 * tiles.programs_per_sm * (4 if tiles.hopper else 1)  # it has four groups of warps
    return {"shared": attend["shared"] * tiles.programs_per_sm, "registers": taken, "spilled": attend["spilled"],
            "programs": tiles.programs_per_sm, "merge_spilled": merge["spilled"], "store_spilled": store["spilled"],
            "hopper": tiles.hopper}  # fmt: skip


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
    source = GluonASTSource if kernel is attend_latent_hopper else ASTSource
    used = {name: constants[name] for name in constants if name in kernel.arg_names}
    result = triton.compile(source(kernel, signature, used, attributes), target=named().target, options=options)
    return resources_of(result)


if __name__ == "__main__":
    largest = {name: variant for name, variant in VARIANTS.items() if variant[0] >= 256 and "on Hopper" not in name}
    for name, variant in (VARIANTS if named().machine.hopper else largest).items():
        print(json.dumps({"variant": name, **compiled(*variant)}), flush=True)
