"""Compile the kernels of recurrences for SM90 without a GPU; prints a line of JSON per variant. Run by test_triton_scans_compile in a
process of its own, because a process of the tests runs Triton's interpreter."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_attn.backends.scans.triton.conv_kernel import conv_extend, conv_state, conv_step
from paged_attn.backends.scans.triton.kda_kernel import scan_by_channel, solve_by_channel, sum_decays
from paged_attn.backends.scans.triton.prompts_kernel import scan_channels, scan_chunks, scan_numbers, solve_chunks
from paged_attn.backends.scans.triton.ssd_kernel import chunk_outputs, chunk_states
from paged_attn.backends.scans.triton.steps_kernel import channel_kernel, gated_delta_kernel, mamba1_kernel, mamba2_kernel

POINTERS = {
    "x": "*bf16", "weight": "*bf16", "bias": "*bf16", "output": "*bf16", "rows": "*i64", "slots": "*i64", "owners": "*i64",
    "starts": "*i64", "ends": "*i64", "continues": "*i1", "query": "*bf16", "key": "*bf16", "value": "*bf16", "g": "*fp32",
    "beta": "*bf16", "states": "*fp32", "dt": "*bf16", "a": "*fp32", "b": "*bf16", "c": "*bf16", "scale": "fp32", "eps": "fp32",
    "initial": "fp32", "requests": "*i64", "chunks": "*i64", "segments": "*i64", "targets": "*i64", "new": "*bf16", "reads": "*bf16",
    "sums": "*fp32", "scores": "*bf16", "step": "*fp32", "decay": "*fp32", "before": "*bf16",
}  # fmt: skip
CONV: dict[str, Any] = {"C": 8192, "GROUP": 8192, "TAPS": 4, "WIDTH": 4, "HAS_BIAS": True, "SILU": True, "BLOCK": 128}
CONV_STEP: dict[str, Any] = {name: value for name, value in CONV.items() if name != "GROUP"} | {"PARTS": 0, "COLUMNS": (), "W": 4}
QKV = (0, 0, 16, 768, 128, 2048, 128, 16, 768, 128, 4096, 256, 16, 768, 256)  # queries, keys and values of 16 groups
SOLVED: dict[str, Any] = {
    "HEADS": 32, "REPEATS": 2, "K": 128, "V": 128, "NORMALISE": True, "CHUNK": 32, "BLOCK_K": 128, "BLOCK_V": 64, "NARROW": tl.bfloat16,
    "k_dim": 1, "v_dim": 1,
}  # fmt: skip
CHUNKED: dict[str, Any] = {name: value for name, value in SOLVED.items() if name != "v_dim"} | {"q_dim": 1, "state_v": 1}
SSD: dict[str, Any] = {
    "REPEATS": 128, "HEADS": 128, "P": 64, "N": 128, "CHUNK": 64, "BLOCK_P": 64, "NARROW": tl.bfloat16, "x_dim": 1, "step_head": 1,
    "decay_head": 1, "b_dim": 1,
}  # fmt: skip
BEFORE: dict[str, Any] = {**SSD, "BLOCK_N": 64, "state_n": 1}
READ: dict[str, Any] = {**SSD, "BLOCK_N": 128, "TOGETHER": 16, "c_dim": 1}
FALCON: dict[str, Any] = {"REPEATS": 24, "HEADS": 24, "P": 128, "N": 256}
LINEAR: dict[str, Any] = {"REPEATS": 1, "HEADS": 64, "P": 128, "N": 128, "step_row": 0, "step_head": 0}  # MiniMax-Text-01's
LONG: dict[str, Any] = {"K": 256, "BLOCK_K": 256}
BY_CHANNEL: dict[str, Any] = {**SOLVED, "q_dim": 1, "REPEATS": 1}
SCANNED: dict[str, Any] = {name: value for name, value in BY_CHANNEL.items() if name != "v_dim"} | {"state_v": 1}
CHANNELS: dict[str, Any] = {
    "C": 8192, "N": 16, "x_dim": 1, "dt_dim": 1, "b_dim": 1, "c_dim": 1, "BLOCK_T": 32, "BLOCK_C": 4, "BLOCK_N": 16,
}  # fmt: skip
NUMBERS: dict[str, Any] = {"C": 4096, "decay_dim": 1, "x_dim": 1, "BLOCK_T": 32, "BLOCK_C": 64}
STEP: dict[str, Any] = {
    "K": 128,
    "V": 128,
    "NORMALISE": True,
    "RULE": True,
    "BEFORE": False,
    "HAS_ROWS": True,
    "BLOCK_K": 128,
    "BLOCK_V": 32,
}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "conv_step": (conv_step, {**CONV_STEP, "HAS_ROWS": True}),
    "conv_step in order": (conv_step, {**CONV_STEP, "HAS_ROWS": False, "rows": None, "HAS_BIAS": False, "bias": None}),
    "conv_step narrow": (conv_step, {**CONV_STEP, "WIDTH": 3, "HAS_ROWS": False, "rows": None}),
    "conv_step of Qwen3-Next": (conv_step, {**CONV_STEP, "PARTS": 3, "COLUMNS": QKV, "HAS_ROWS": False, "rows": None}),
    "conv_extend of groups": (conv_extend, {**CONV, "C": 4096, "GROUP": 256, "TOKENS": 8, "BLOCK": 256, "x_channel": 1}),
    "conv_extend": (conv_extend, {**CONV, "TOKENS": 8, "BLOCK": 256, "x_channel": 1}),
    "conv_state": (conv_state, {"C": 8192, "GROUP": 8192, "WIDTH": 4, "BLOCK": 128, "W": 4}),
    "gated_delta": (gated_delta_kernel, {**STEP, "REPEATS": 2, "BY_CHANNEL": False}),
    "kda": (gated_delta_kernel, {**STEP, "REPEATS": 1, "BY_CHANNEL": True}),
    "linear_attention": (
        gated_delta_kernel,
        {**STEP, "REPEATS": 1, "BY_CHANNEL": False, "NORMALISE": False, "RULE": False, "beta": None, "beta_row": 0, "beta_head": 0},
    ),
    "mamba2": (mamba2_kernel, {"REPEATS": 16, "P": 64, "N": 128, "HAS_ROWS": True, "BLOCK_P": 32, "BLOCK_N": 128}),
    "mamba1": (mamba1_kernel, {"C": 8192, "N": 16, "HAS_ROWS": False, "rows": None, "BLOCK_C": 256, "BLOCK_N": 16}),
    "solve_chunks": (solve_chunks, SOLVED),
    "solve_chunks of long keys": (solve_chunks, SOLVED | LONG),
    "scan_chunks": (scan_chunks, CHUNKED),
    "scan_chunks of long keys": (scan_chunks, CHUNKED | LONG),
    "scan_chunks of float32": (scan_chunks, {**CHUNKED, "CHUNK": 16, "BLOCK_V": 32, "NARROW": None}),
    "sum_decays": (sum_decays, {"HEADS": 32, "K": 128, "CHUNK": 32, "BLOCK_K": 128, "g_dim": 1}),
    "solve_by_channel": (solve_by_channel, {**BY_CHANNEL, "PART": 16}),
    "solve_by_channel of float32": (solve_by_channel, {**BY_CHANNEL, "PART": 16, "CHUNK": 16, "BLOCK_V": 32, "NARROW": None}),
    "scan_by_channel": (scan_by_channel, SCANNED),
    "scan_by_channel of float32": (scan_by_channel, {**SCANNED, "CHUNK": 16, "BLOCK_V": 32, "NARROW": None}),
    "solve_by_channel of long keys": (solve_by_channel, {**BY_CHANNEL, "PART": 16} | LONG),
    "scan_by_channel of long keys": (scan_by_channel, SCANNED | LONG),
    "chunk_states": (chunk_states, BEFORE),
    "chunk_states of Falcon-H1": (chunk_states, BEFORE | FALCON),
    "chunk_states of float32": (chunk_states, {**BEFORE, "CHUNK": 32, "BLOCK_P": 32, "NARROW": None}),
    "chunk_outputs": (chunk_outputs, READ),
    "chunk_outputs of Falcon-H1": (chunk_outputs, READ | FALCON | {"BLOCK_N": 256, "TOGETHER": 8}),
    "chunk_outputs of longer states": (chunk_outputs, READ | {"P": 16, "N": 272, "BLOCK_N": 256, "TOGETHER": 4, "HEADS": 4, "REPEATS": 4}),
    "chunk_outputs of float32": (chunk_outputs, READ | FALCON | {"BLOCK_N": 32, "TOGETHER": 8, "CHUNK": 32, "BLOCK_P": 32, "NARROW": None}),
    "chunk_states of linear attention": (
        chunk_states, {**{key: value for key, value in BEFORE.items() if key != "state_n"}, "state_p": 1} | LINEAR,
    ),
    "chunk_outputs of linear attention": (chunk_outputs, READ | LINEAR | {"TOGETHER": 1}),
    "scan_channels": (scan_channels, CHANNELS),
    "channel_scan": (channel_kernel, {"C": 4096, "MAXIMUM": False, "HAS_ROWS": True, "BLOCK_C": 1024}),
    "channel_scan of maxima": (channel_kernel, {"C": 4096, "MAXIMUM": True, "HAS_ROWS": False, "rows": None, "BLOCK_C": 1024}),
    "scan_numbers": (scan_numbers, NUMBERS | {"MAXIMUM": False}),
    "scan_numbers of maxima": (scan_numbers, NUMBERS | {"MAXIMUM": True}),
}  # fmt: skip

WITHOUT = ("rows", "slots", "scale", "eps")  # what is not sure to be divisible by 16


def compiled(kernel: Any, constants: dict[str, Any]) -> dict[str, int]:
    signature = {each: "constexpr" if each in constants else POINTERS.get(each, "i32") for each in kernel.arg_names}
    named = [(index, name) for index, name in enumerate(kernel.arg_names) if name not in constants and name not in WITHOUT]
    attributes = {(index,): [["tt.divisibility", 16]] for index, _ in named}
    options = {"num_stages": 1, "num_warps": 8} if kernel in (scan_chunks, scan_by_channel) else {}
    if kernel is chunk_outputs:
        options = {"num_stages": 3 if constants["BLOCK_N"] < 256 else 2 if constants["N"] <= 256 else 1}
    result = triton.compile(ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", 90, 32), options=options)
    return {"cubin": len(result.asm["cubin"]), "shared": result.metadata.shared, "spilled": spilled(result.asm["ptx"])}


def spilled(ptx: str) -> int:
    """Bytes of registers that ptxas stores to local memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
        log = subprocess.run(command, check=True, text=True, capture_output=True).stderr
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", log))


if __name__ == "__main__":
    for name, (kernel, constants) in VARIANTS.items():
        print(json.dumps({"variant": name, **compiled(kernel, constants)}), flush=True)
