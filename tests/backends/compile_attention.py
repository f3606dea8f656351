"""Compile the attention kernels for a GPU that is named, without having it; prints a line of JSON per variant. Run by test_triton_compile
in a process of its own, because a process of the tests runs Triton's interpreter."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.triton.attend_kernel import attend
from paged_attn.backends.attention.triton.hopper.kernel import attend_hopper
from paged_attn.backends.attention.triton.launch import LayerLaunch
from paged_attn.backends.attention.triton.tiling import tiling
from paged_attn.backends.attention.triton.together.attend_kernel import attend_together
from paged_attn.backends.attention.triton.work_partition import PartitionKind
from tests.backends.gpus import named
from tests.backends.kernel_resources import resources_of

TYPED = {"query", "keys", "values", "out", "new_keys", "new_values", "sinks", "bias", "lse"}
INTEGERS = {"ends", "page_table", "seq_lens", "query_start", "work", "counters"}
FLOATS = {"slopes", "partial", "partial_stats"}
LONG, SHORT = 9000, 1000  # contexts, on which the blocks of an extension depend; one short request is decoded with an early launch
DIM_64 = {"qk_head_dim": 64, "v_head_dim": 64}
DIM_256 = {"qk_head_dim": 256, "v_head_dim": 256}
DIM_512 = {"qk_head_dim": 512, "v_head_dim": 512}
FLOAT32 = {"dtype": torch.float32}
EVERY = {"sliding_window": 512, "chunk": 4096, "softcap": 30.0, "has_sinks": True, "causal": False, "gives_lse": True}
VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "decode": ("one", LONG, {}),
    "decode_short": ("one", SHORT, {}),
    "decode_short_256": ("one", SHORT, DIM_256 | {"num_q_heads": 64, "num_kv_heads": 1}),
    "decode_features": ("one", LONG, {"sliding_window": 512, "softcap": 30.0, "has_sinks": True}),
    "decode_mha_256": ("one", LONG, {"num_kv_heads": 32, "qk_head_dim": 256, "v_head_dim": 256}),
    "decode_inter": ("one", LONG, {"chunk": 4096, "chunk_part": "inter", "gives_lse": True}),
    "together": ("together", LONG, {}),
    "together_features": ("together", LONG, {"softcap": 30.0, "has_sinks": True, "gives_lse": True}),
    "together_mha_64": ("together", LONG, {"num_kv_heads": 32} | DIM_64),
    "together_256": ("together", LONG, DIM_256),
    "together_float32": ("together", LONG, FLOAT32),
    "deterministic": ("all", LONG, {"sliding_window": 512}),
    "extend": ("more", LONG, {}),
    "extend_short": ("more", SHORT, {}),
    "extend_window": ("more", LONG, {"sliding_window": 512}),
    "extend_64": ("more", LONG, DIM_64),
    "extend_all": ("more", LONG, EVERY),
    "extend_all_short": ("more", SHORT, EVERY),
    "extend_all_64": ("more", LONG, EVERY | DIM_64),
    "extend_all_64_short": ("more", SHORT, EVERY | DIM_64),
    "extend_192": ("more", LONG, {"qk_head_dim": 192}),
    "extend_192_short": ("more", SHORT, {"qk_head_dim": 192}),
    "extend_all_192": ("more", LONG, EVERY | {"qk_head_dim": 192}),
    "extend_256": ("more", LONG, DIM_256),
    "extend_all_256": ("more", LONG, EVERY | DIM_256),
    "extend_all_80": ("more", LONG, EVERY | {"qk_head_dim": 80, "v_head_dim": 80}),
    "extend_96": ("more", LONG, {"qk_head_dim": 96, "v_head_dim": 96}),
    "extend_160": ("more", LONG, {"qk_head_dim": 160, "v_head_dim": 160}),
    "extend_all_192_192": ("more", LONG, EVERY | {"qk_head_dim": 192, "v_head_dim": 192}),
    "extend_successive": ("more", LONG, {"chunk": 4096, "chunk_part": "successive", "gives_lse": True}),
    "extend_alibi": ("more", LONG, {"alibi_slopes": (0.5,) * 32}),
    "decode_512": ("one", LONG, DIM_512),
    "extend_512": ("more", LONG, DIM_512),
    "decode_float32": ("one", LONG, FLOAT32),
    "extend_float32": ("more", LONG, FLOAT32),
    "extend_512_float32": ("more", LONG, DIM_512 | FLOAT32),
    "deterministic_512_float32": ("all", LONG, DIM_512 | FLOAT32),
}


def compiled(rows: str, context: int, changes: dict[str, Any]) -> dict[str, Any]:
    fields = {"num_q_heads": 32, "num_kv_heads": 8, "qk_head_dim": 128, "v_head_dim": 128, "scale": 0.1, "dtype": torch.bfloat16}
    dtype = (fields := fields | changes).pop("dtype")
    spec, word = AttentionSpec(**fields), "*bf16" if dtype == torch.bfloat16 else "*fp32"
    total = context if context == SHORT else 1 << 20
    tiles = tiling(rows, spec, dtype, 1 if rows in ("one", "together") else 512, context, total, named().machine)
    pool = KVPool([spec], 2, 16, dtype)
    launch = LayerLaunch.of(pool, 0, PartitionKind.of(spec, rows, tiles), fused_write=rows in ("one", "together"))
    kernel, source = (attend_hopper, GluonASTSource) if tiles.hopper else (attend_together if rows == "together" else attend, ASTSource)
    constants = {
        **launch.constants,
        "HAS_LSE": spec.gives_lse,
        **({} if tiles.hopper else {"PRECISION": "tf32" if word == "*bf16" else "ieee"}),
    }
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = word if name in TYPED else "*i32" if name in INTEGERS else "*fp32" if name in FLOATS else None
        signature[name] = pointer or ("fp32" if name in ("scale", "softcap") else "i32")
        if pointer or (name.endswith("stride") and name != "table_stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    result = triton.compile(source(kernel, signature, constants, attributes), target=named().target, options=launch.options)
    chosen = {"hopper": tiles.hopper, "block_n": tiles.block_n, "early": tiles.early}
    return {**chosen, **resources_of(result), "cubin": len(result.asm["cubin"])}


# Of shared memory, off Hopper.
LARGEST = ("decode_mha_256", "decode_short_256", "together_256", "deterministic", "extend", "extend_512", "extend_512_float32")


if __name__ == "__main__":
    for name, variant in VARIANTS.items() if named().machine.hopper else [(name, VARIANTS[name]) for name in LARGEST]:
        print(json.dumps({"variant": name, **compiled(*variant)}), flush=True)
