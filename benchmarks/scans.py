"""A recurrence at published shapes: microseconds of its kernels, beside the float32 truth in `attn_ops/scans/` and beside what reading its
operands and states once takes.

    python benchmarks/scans.py --json out.json                    on a GPU, every shape, prompts and decoding rows
    python benchmarks/scans.py --every 1024 --decode              prompts whose states are kept on the way
    python benchmarks/scans.py --device cpu --shape bamba-9b --prompts 64 --decode 2     anywhere: the truth alone
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.requests import StateCheckpoint
from paged_attn.attn_ops.scans.gated_delta import gated_delta_extend, gated_delta_step
from paged_attn.attn_ops.scans.kda import kda_extend
from paged_attn.attn_ops.scans.linear import linear_attention_extend, linear_attention_step
from paged_attn.attn_ops.scans.mamba1 import mamba1_extend, mamba1_step
from paged_attn.attn_ops.scans.mamba2 import mamba2_extend, mamba2_step
from paged_attn.attn_ops.scans.state_rows import Extends, StateRows
from paged_attn.backends.devices import architecture_of, device_word
from paged_attn.backends.scans.base import ScanProblem
from paged_attn.backends.selection.scans import BUILT_IN, reasons_against, scans_backend

PROMPTS = ("8192", "2048,2048,2048,2048", "512", "16," * 63 + "16")
DECODE = (1, 8, 32, 128)
HBM = 4.8e12  # bytes a second of an H200, by its data sheet
BUSY = 40_000_000  # cycles, some 20 ms
REPEATS = 10
INFINITE = float("inf")


class Shape(NamedTuple):
    """Of one layer: which recurrence, and the shape of its state."""

    kind: str
    state: tuple[int, ...]
    groups: int = 1


SHAPES = {
    "qwen3-next": Shape("gated_delta", (32, 128, 128), 16),
    "kimi-linear": Shape("kda", (32, 128, 128), 32),
    "minimax-text-01": Shape("linear", (64, 128, 128), 64),
    "bamba-9b": Shape("mamba2", (128, 64, 128)),
    "nemotron-h-8b": Shape("mamba2", (128, 64, 128), 8),
    "falcon-h1-7b": Shape("mamba2", (24, 128, 256)),
    "falcon-mamba-7b": Shape("mamba1", (8192, 16)),
}


def operands(shape: Shape, rows: int, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """What the functions take before the states: of 16-bit layers, decays in float32 as models have them."""

    def of(*sizes: int) -> Tensor:
        return torch.randn(rows, *sizes, device=device).to(dtype)

    if shape.kind in ("gated_delta", "kda"):
        heads, k, v = shape.state
        channels = [k] if shape.kind == "kda" else []
        decay, learned = -torch.rand(rows, heads, *channels, device=device), torch.rand(rows, heads, device=device).to(dtype)
        return [of(shape.groups, k), of(shape.groups, k), of(heads, v), decay, learned, of(heads, v), True]
    if shape.kind == "linear":
        heads, k, v = shape.state
        return [of(heads, k), of(heads, k), of(heads, v), -torch.rand(heads, device=device).expand(rows, heads), of(heads, v), False]
    if shape.kind == "mamba2":
        heads, p, n = shape.state
        rates = -torch.rand(heads, device=device)
        return [of(heads, p), of(heads).abs(), rates, of(shape.groups, n), of(shape.groups, n), of(heads, p)]
    channels, n = shape.state
    rates = -torch.rand(channels, n, device=device)
    return [of(channels), of(channels).abs(), rates, of(n), of(n), of(channels)]


OPS = {
    "gated_delta": ("gated_delta_rule", gated_delta_extend, gated_delta_step), "kda": ("kda", kda_extend, gated_delta_step),
    "linear": ("linear_attention", linear_attention_extend, linear_attention_step),
    "mamba2": ("mamba2_scan", mamba2_extend, mamba2_step),
    "mamba1": ("mamba1_scan", mamba1_extend, mamba1_step),
}  # fmt: skip


def functions(shape: Shape, decode: bool, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[..., Any]]:
    """By name: the truth, and that of each backend that has one and runs here."""
    op, *truths = OPS[shape.kind]
    truth = truths[decode]
    problem = ScanProblem(op, shape.state, dtype, device_word(device), architecture_of(device))
    fitting = {name: scans_backend(name).kernels() for name in BUILT_IN if not reasons_against(name, problem)}
    return {"truth": truth, **{name: kernels[truth] for name, kernels in fitting.items() if truth in kernels}}


def microseconds(run: Callable[[], Any], device: torch.device) -> float:
    """On a GPU the mean, behind kernels that keep it busy until all is launched: what the host takes is not in it. On a CPU the median."""
    run()
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY)
        begin.record()
        for _ in range(REPEATS):
            run()
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) * 1e3 / REPEATS
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        taken.append((time.perf_counter() - started) * 1e6)
    return statistics.median(taken)


def row_of(shape: Shape, lengths: Sequence[int], decode: int, dtype: torch.dtype, device: torch.device, every: int) -> dict[str, Any]:
    """Times of some prompts, or of `decode` decoding rows; and how far the kernels are from the truth, as a share of its largest number."""
    requests, rows = len(lengths) or decode, sum(lengths) or decode
    given = operands(shape, rows, dtype, device)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    slots, free = list(range(1, requests + 1)), itertools.count(requests + 1)
    on_the_way = [[StateCheckpoint(end, next(free)) for end in range(every, length, every)] if every else [] for length in lengths]
    states = torch.randn(next(free), *shape.state, device=device)
    checkpoints = {index: kept for index, kept in enumerate(on_the_way) if kept}
    where = Extends(starts, lengths, slots, [True] * requests, device, checkpoints) if lengths else None
    decoding = StateRows(None, torch.tensor(slots, dtype=torch.int32, device=device), None)
    limits = (0.0, INFINITE) if shape.kind == "mamba2" and lengths else ()
    outputs, found = {}, dict[str, Any]()
    for name, function in functions(shape, not lengths, dtype, device).items():
        output = given[5]
        after = states.clone()
        call = partial(function, *given, *limits, after, where if lengths else decoding)
        call()
        outputs[name] = (output.clone().float(), after.clone())
        found[f"{name} us"] = microseconds(call, device)
    for name in outputs.keys() - {"truth"}:
        pairs = zip(outputs[name], outputs["truth"], strict=True)
        found[f"{name} error"] = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    read = sum(each.nbytes for each in given if isinstance(each, Tensor)) + states[1:].nbytes + states[1 : requests + 1].nbytes
    return {**found, "read once us": read / HBM * 1e6}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", nargs="*", default=PROMPTS, help="lengths that run together, with commas")
    parser.add_argument("--decode", nargs="*", type=int, default=DECODE, help="numbers of decoding rows")
    parser.add_argument("--every", type=int, default=0, help="tokens between the states of a prompt that are kept on the way; 0: none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    device, dtype, table = torch.device(args.device), getattr(torch, args.dtype), []
    for name in args.shape or SHAPES:
        cases = [*((tuple(map(int, lengths.split(","))), 0) for lengths in args.prompts), *(((), count) for count in args.decode)]
        for lengths, decode in cases:
            what = f"{len(lengths)} prompts of {sum(lengths)} tokens" if lengths else f"{decode} decoding"
            row = {"shape": name, "what": what, **row_of(SHAPES[name], lengths, decode, dtype, device, args.every)}
            table.append(row)
            print(" ".join(f"{key}={value:.4g}" if isinstance(value, float) else str(value) for key, value in row.items()), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"torch": torch.__version__, "dtype": args.dtype, "rows": table}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
