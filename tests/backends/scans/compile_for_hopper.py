"""Compile the kernels of recurrences for SM90 without a GPU; prints a line of JSON per variant. Run by test_triton_scans_compile in a
process of its own, because a process of the tests runs Triton's interpreter."""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_attn.backends.scans.triton.conv_kernel import conv_extend, conv_state, conv_step
from paged_attn.backends.scans.triton.steps_kernel import gated_delta_kernel, mamba1_kernel, mamba2_kernel

POINTERS = {
    "x": "*bf16", "weight": "*bf16", "bias": "*bf16", "output": "*bf16", "rows": "*i64", "slots": "*i64", "taps": "*i64", "last": "*i64",
    "continues": "*i1", "query": "*bf16", "key": "*bf16", "value": "*bf16", "g": "*fp32", "beta": "*bf16", "states": "*fp32", "dt": "*bf16",
    "a": "*fp32", "b": "*bf16", "c": "*bf16", "scale": "fp32", "eps": "fp32",
}  # fmt: skip
CONV: dict[str, Any] = {"C": 8192, "TAPS": 4, "WIDTH": 4, "HAS_BIAS": True, "SILU": True, "BLOCK": 128}
DELTA: dict[str, Any] = {"K": 128, "V": 128, "NORMALISE": True, "HAS_ROWS": True, "BLOCK_K": 128, "BLOCK_V": 32}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "conv_step": (conv_step, {**CONV, "W": 4, "HAS_ROWS": True}),
    "conv_step in order": (conv_step, {**CONV, "W": 4, "HAS_ROWS": False, "rows": None, "HAS_BIAS": False, "bias": None}),
    "conv_step narrow": (conv_step, {**CONV, "WIDTH": 3, "W": 4, "HAS_ROWS": False, "rows": None}),
    "conv_extend": (conv_extend, CONV),
    "conv_state": (conv_state, {"C": 8192, "WIDTH": 4, "BLOCK": 128, "W": 4}),
    "gated_delta": (gated_delta_kernel, {**DELTA, "REPEATS": 2, "BY_CHANNEL": False}),
    "kda": (gated_delta_kernel, {**DELTA, "REPEATS": 1, "BY_CHANNEL": True}),
    "mamba2": (mamba2_kernel, {"REPEATS": 16, "P": 64, "N": 128, "HAS_ROWS": True, "BLOCK_P": 32, "BLOCK_N": 128}),
    "mamba1": (mamba1_kernel, {"C": 8192, "N": 16, "HAS_ROWS": False, "rows": None, "BLOCK_C": 256, "BLOCK_N": 16}),
}  # fmt: skip

if __name__ == "__main__":
    for name, (kernel, constants) in VARIANTS.items():
        signature = {each: "constexpr" if each in constants else POINTERS.get(each, "i32") for each in kernel.arg_names}
        result = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
        print(json.dumps({"variant": name, "cubin": len(result.asm["cubin"])}), flush=True)
