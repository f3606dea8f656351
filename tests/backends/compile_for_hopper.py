"""Compile the attention kernels for SM90 without a GPU; prints a line of JSON per variant. Run by test_triton_compile in a process of its
own, because a process of the tests runs Triton's interpreter."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from paged_attn.attn_ops.kv_pool import KVPool
from paged_attn.attn_ops.spec import AttentionSpec
from paged_attn.backends.triton import tiling as tiling_module
from paged_attn.backends.triton.attend_kernel import attend
from paged_attn.backends.triton.hopper_kernel import attend_hopper
from paged_attn.backends.triton.launch import LayerLaunch
from paged_attn.backends.triton.shares import ShareKind
from paged_attn.backends.triton.tiling import Machine, tiling

SIXTEEN_BITS = {"query", "keys", "values", "out", "new_keys", "new_values", "sinks", "bias", "lse"}
INTEGERS = {"page_table", "seq_lens", "query_start", "work", "counters"}
FLOATS = {"slopes", "partial", "partial_stats"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "decode": ("one", {}),
    "decode_features": ("one", {"sliding_window": 512, "softcap": 30.0, "has_sinks": True}),
    "decode_mha_256": ("one", {"num_kv_heads": 32, "qk_head_dim": 256, "v_head_dim": 256}),
    "deterministic": ("all", {"sliding_window": 512}),
    "extend": ("more", {}),
    "extend_window": ("more", {"sliding_window": 512}),
    "extend_64": ("more", {"qk_head_dim": 64, "v_head_dim": 64}),
    "extend_192": ("more", {"qk_head_dim": 192}),
    "extend_alibi": ("more", {"alibi_slopes": (0.5,) * 32}),
}


def compiled(rows: str, changes: dict[str, Any], context: int = 9000, lse: bool = False) -> dict[str, Any]:
    fields = {"num_q_heads": 32, "num_kv_heads": 8, "qk_head_dim": 128, "v_head_dim": 128, "scale": 0.1}
    spec = AttentionSpec(**{**fields, **changes})
    tiles = tiling(rows, spec, torch.bfloat16, 1 if rows == "one" else 512, context, 1 << 20, Machine(132, True))
    pool = KVPool([spec], 2, 16, torch.bfloat16)
    launch = LayerLaunch.of(pool, 0, ShareKind.of(spec, rows, tiles), fused_write=rows == "one")
    kernel, source = (attend_hopper, GluonASTSource) if tiles.hopper else (attend, ASTSource)
    constants = {**launch.constants, "HAS_LSE": lse, **({} if tiles.hopper else {"PRECISION": "tf32"})}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = "*bf16" if name in SIXTEEN_BITS else "*i32" if name in INTEGERS else "*fp32" if name in FLOATS else None
        signature[name] = pointer or ("fp32" if name in ("scale", "softcap") else "i32")
        if pointer or (name.endswith("stride") and name != "table_stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    result = triton.compile(source(kernel, signature, constants, attributes), target=GPUTarget("cuda", 90, 32), options=launch.options)
    return {"hopper": tiles.hopper, "shared": result.metadata.shared, "cubin": len(result.asm["cubin"])}


if __name__ == "__main__":
    for name, (rows, changes) in VARIANTS.items():
        print(json.dumps({"variant": name, **compiled(rows, changes)}), flush=True)
    tiling_module.in_hopper_kernel = lambda spec: True  # what it is written for, and not let in before it was seen to be right
    every = {"sliding_window": 512, "chunk": 4096, "softcap": 30.0, "has_sinks": True, "causal": False}
    print(json.dumps({"variant": "extend_all", **compiled("more", every, lse=True)}), flush=True)
    print(json.dumps({"variant": "extend_short", **compiled("more", {}, context=1000)}), flush=True)
