"""Linears of 1 to 16 rows: our kernel in many configs against torch.nn.functional.linear (cuBLAS), at the shapes of Llama-3.1-8B.

python benchmarks/skinny_linear.py [--out benchmarks/results/skinny_linear.json] [--only down] [--rows 2,1,8,16]

A time is that of one call in a CUDA graph of 20, over weights that rotate through at least 400 MB (the L2 cache has 50): the median of the
graph's replays. "chain" is the same with a small kernel in front of each call that makes its input, as in a model; it includes that kernel,
whose own time is in the line of the shape. Every config is checked against float32 before it is timed. The first of --rows goes through the
whole sweep, the others through the best three of it. Kernels are compiled by several processes first. --smoke: tiny sizes, anywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

from triton.runtime.errors import OutOfResources

from paged_attn.backends.triton.skinny_kernel import skinny_linear_kernel
from paged_attn.backends.triton.skinny_linear import SkinnyConfig, config_of, skinny_linear
from paged_attn.backends.triton.tiling import machine_of

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "lm_head": (128256, 4096)}
TINY = {"one": (48, 64), "two": (80, 96)}
CALLS, REPLAYS, ROTATING = 20, 9, 400e6
# block_n, block_k, stages, warps, programs per multiprocessor; as much of the weight is under way as fits into shared memory or a half of it
CUT = (
    (64, 128, 4, 4, 2), (64, 128, 4, 4, 3), (64, 128, 5, 4, 2), (64, 128, 6, 4, 2), (64, 256, 3, 4, 2), (64, 256, 4, 4, 2), (64, 256, 4, 8, 2),
    (64, 256, 5, 8, 1), (32, 256, 4, 4, 2), (32, 256, 4, 4, 3), (32, 256, 4, 2, 3), (32, 256, 5, 4, 2), (32, 512, 3, 4, 2), (32, 512, 4, 4, 1),
    (16, 256, 4, 2, 4), (16, 256, 5, 2, 4), (16, 256, 6, 2, 3), (16, 512, 3, 4, 4), (16, 512, 4, 2, 3), (16, 256, 4, 1, 4), (128, 128, 3, 4, 2),
    (128, 128, 4, 4, 2), (128, 128, 4, 8, 2), (128, 128, 6, 8, 1), (128, 64, 5, 4, 2),
)  # fmt: skip
WHOLE = ((16, 256, 5, 2, 2), (16, 512, 4, 2, 3), (16, 512, 5, 4, 2), (32, 256, 6, 4, 1), (32, 512, 5, 4, 1), (64, 256, 4, 4, 1), (32, 256, 4, 4, 3))
FIELDS = ("block_n", "block_k", "stages", "warps", "programs_per_sm")


def configs() -> list[SkinnyConfig]:
    def made(values: tuple[int, ...], **changes: Any) -> SkinnyConfig:
        return SkinnyConfig(**dict(zip(FIELDS, values, strict=True)), **changes)

    variations: tuple[dict[str, Any], ...] = ({"early": False}, {"prefetch": 0}, {"prefetch": 12}, {"hints": True}, {"weight_left": False})
    varied = [made(CUT[base], **change) for base in (0, 8) for change in variations]
    return [*(made(values) for values in CUT), *(made(values, whole=True) for values in WHOLE), *varied]


def label(config: SkinnyConfig | None) -> str:
    if config is None:
        return "F.linear"
    extra = [f"prefetch {config.prefetch}" if config.early else "late"]
    extra += [name for name, on in (("whole", config.whole), ("hints", config.hints), ("x left", not config.weight_left)) if on]
    return f"{config.block_n}x{config.block_k} s{config.stages} w{config.warps} p{config.programs_per_sm} {' '.join(extra)}"


def compile_part(work: list[tuple[tuple[int, int], int, SkinnyConfig]], dtype: torch.dtype) -> None:
    """Fill Triton's disk cache, without a launch."""
    machine = machine_of(torch.device("cuda"))
    for (n, k), rows, config in work:
        early = config.early and machine.early
        constants = config.constants(n, k, rows, machine.multiprocessors, early, False)
        pointers = (dtype, dtype, dtype, dtype, torch.float32, torch.int32)
        skinny_linear_kernel.warmup(*pointers, rows, k, grid=(1,), **constants, **config.options(early))


def compile_all(argv: list[str], jobs: int) -> float:
    started = time.perf_counter()
    command = [sys.executable, __file__, *argv, "--compile"]
    processes = [subprocess.Popen([*command, str(i), str(jobs)]) for i in range(jobs)]
    failed = [process.args for process in processes if process.wait() != 0]
    if failed:
        raise SystemExit(f"compiling failed in {len(failed)} of {jobs} processes, see above")
    return time.perf_counter() - started


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one run of `work`, which is recorded into a graph on CUDA."""
    samples = []
    if device.type != "cuda":
        for _ in range(2):
            started = time.perf_counter()
            work()
            samples.append(time.perf_counter() - started)
        return min(samples)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    for _ in range(REPLAYS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e-3)
    del kept
    return statistics.median(samples[2:])


def measure(x: Tensor, weights: list[Tensor], config: SkinnyConfig | None, expected: Tensor) -> dict[str, Any]:
    """A row of the table; the numbers are checked first, of two calls that must be bitwise equal."""

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight) if config is None else skinny_linear(x, weight, config=config)

    row: dict[str, Any] = {"config": label(config), "fields": config and asdict(config)}
    try:
        first, again = call(x, weights[0]), call(x, weights[0])
    except OutOfResources as error:
        return row | {"error": str(error)}
    wrong = float((first.float() - expected).abs().max() / expected.abs().max())
    if not wrong < 0.01 or (config is not None and not torch.equal(first, again)):
        return row | {"error": f"wrong numbers: {wrong:.3g} of the largest, repeated equal: {torch.equal(first, again)}"}
    calls = CALLS if x.is_cuda else 2
    alone = seconds(lambda: [call(x, weights[i % len(weights)]) for i in range(calls)], x.device) / calls
    made = torch.empty_like(x)

    def chain() -> list[Tensor]:
        return [call(torch.mul(x, 1, out=made), weights[i % len(weights)]) for i in range(calls)]

    chained = seconds(chain, x.device) / calls
    gbytes = (weights[0].numel() + x.numel() + first.numel()) * x.itemsize * 1e-9
    return row | {"microseconds": alone * 1e6, "chain_microseconds": chained * 1e6, "gbytes_per_s": gbytes / alone, "wrong": wrong}


def measure_shape(name: str, n: int, k: int, args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    copies = max(2, math.ceil(ROTATING / (n * k * 2))) if not args.smoke else 2
    weights = [torch.randn(n, k, device=device, dtype=dtype) for _ in range(copies)]
    candidates = list(dict.fromkeys([config_of(n, k, args.rows[0]), *(configs()[:2] if args.smoke else configs())]))
    for rows in args.rows:
        x = torch.randn(rows, k, device=device, dtype=dtype)
        made = torch.empty_like(x)
        small = seconds(lambda x=x, made=made: [torch.mul(x, 1, out=made) for _ in range(CALLS)], device) / CALLS * 1e6
        expected = x.float() @ weights[0].float().t()
        found = [measure(x, weights, config, expected) for config in (None, *candidates)]
        del expected
        reference = found[0]
        timed = sorted((row for row in found if "error" not in row), key=lambda row: row["microseconds"])
        for row in timed:
            row["speedup"] = reference["microseconds"] / row["microseconds"]
            row["chain_speedup"] = reference["chain_microseconds"] / row["chain_microseconds"]
        show(f"{name} [{n} x {k}], {rows} rows; small kernel {small:.2f} us", timed, [row for row in found if "error" in row])
        yield from ({"shape": name, "n": n, "k": k, "rows": rows, "small_kernel_microseconds": small, **row} for row in found)
        if len(candidates) > 3:
            by_chain = sorted(timed, key=lambda row: row["chain_microseconds"])
            best = [row["fields"] for row in (*timed[:3], *by_chain[:2]) if row["fields"]]
            candidates = list(dict.fromkeys(SkinnyConfig(**fields) for fields in best))[:3]


def show(title: str, timed: list[dict[str, Any]], failed: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n{'config':<44}{'us':>9}{'GB/s':>8}{'ratio':>8}{'chain us':>10}{'ratio':>8}")
    for row in timed:
        print(f"{row['config']:<44}{row['microseconds']:9.2f}{row['gbytes_per_s']:8.0f}{row['speedup']:8.3f}"
              f"{row['chain_microseconds']:10.2f}{row['chain_speedup']:8.3f}")  # fmt: skip
    for row in failed:
        print(f"{row['config']:<44} {row['error'][:90]}")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="names of shapes, separated by commas")
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[2, 1, 8, 16])
    parser.add_argument("--jobs", type=int, default=max(1, min(16, os.cpu_count() or 1)), help="processes that compile")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("I", "N"), help="only compile the I-th of N parts")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    shapes = TINY if args.smoke else SHAPES
    unknown = [name for name in args.only.split(",") if name and name not in shapes]
    if unknown:
        raise SystemExit(f"--only {','.join(unknown)}: the shapes are {', '.join(shapes)}")
    shapes = {name: shape for name, shape in shapes.items() if not args.only or name in args.only.split(",")}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.smoke:
        raise SystemExit("there is no CUDA device here; --smoke runs tiny sizes in Triton's interpreter")
    if args.compile:
        work = [(shape, args.rows[0], config) for shape in shapes.values() for config in configs()]
        compile_part(work[args.compile[0] :: args.compile[1]], torch.bfloat16)
        return 0
    started = time.perf_counter()
    torch.manual_seed(0)
    if device.type == "cuda" and not args.smoke:
        print(f"compiled in {compile_all(argv, args.jobs):.1f} s")
    rows = [row for name, (n, k) in shapes.items() for row in measure_shape(name, n, k, args, device)]
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        args.out.write_text(json.dumps({"gpu": gpu, "torch": torch.__version__, "argv": argv, "rows": rows}, indent=1) + "\n")
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    return 1 if any("wrong numbers" in row.get("error", "") for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
