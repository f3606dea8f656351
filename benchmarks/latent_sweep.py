"""Times decode steps over rows of latents by our kernels with other launch numbers, beside other backends: what `tiling.py` should say.

python benchmarks/latent_sweep.py [--heads 16,128 --out latent_sweep.json]       # compiles in parallel, then times; two minutes
python benchmarks/latent_sweep.py --tilings block_n=32,warps=4 hopper=1,early=1  # these, and what tiling.py chooses
python benchmarks/latent_sweep.py --smoke                                        # tiny batches, in Triton's interpreter

A candidate is what `Tiling` has other than `tiling.py` chose, with {"hopper": 0} for the kernel that is not for Hopper. Each is checked
against PyTorch in float32 before it is timed. Microseconds of a layer, and in brackets of attention without the merge.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from kernels import ceilings
from latent_decode import Layer, Step, able, batches, for_latents, spec_of
from prefill import numbers_of
from torch import Tensor
from triton.errors import TritonError

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.triton.backend import TritonBackend
from paged_attn.backends.devices import device_name
from paged_attn.backends.selection.requirements import Requirements

FAILURES = (ImportError, UnsupportedError, RuntimeError, TritonError)  # of a candidate, and not of the sweep
TOLERANCE = 2e-2  # of the largest element
IN_TRITON = "hopper=0,block_m=16,block_n=64,warps=8,stages=3,programs_per_sm=1"
TILINGS = {
    16: (
        "hopper=1,block_m=64,block_n=64,warps=4,stages=2", "hopper=1,block_m=64,block_n=64,warps=4,stages=2,item_cost=4", IN_TRITON,
        f"{IN_TRITON},item_cost=4", "hopper=0,block_m=16,block_n=32,warps=8,stages=3,programs_per_sm=2", "early=1",
    ),
    128: (
        "item_cost=1", "item_cost=3", "item_cost=4", "early=1", "producer_registers=72", "producer_registers=64",
        "hopper=0,block_m=64,block_n=64,warps=8,stages=2",
    ),
}  # fmt: skip


class WithTiling(TritonBackend):
    """The Triton backend with other launch numbers than those of `tiling.py`, and perhaps without the merge."""

    def __init__(self, numbers: dict[str, int], merges: bool = True) -> None:
        super().__init__()
        self.numbers, self.merges = numbers, merges

    def plan(self, batch: Batch, pool: KVPool) -> Any:
        from paged_attn.backends.attention.triton import plan

        chosen = plan.tiling

        def tiling(*args: Any) -> Any:
            return dataclasses.replace(chosen(*args), **self.numbers)

        with patch.object(plan, "tiling", tiling):
            return super().plan(batch, pool)

    def _attend(self, plan: Any, call: Any, fused_write: bool) -> None:
        from paged_attn.backends.attention.triton.latent.launch import LatentLaunch

        if self.merges:
            super()._attend(plan, call, fused_write)
            return
        with patch.object(LatentLaunch, "_merge", lambda *_: None):
            super()._attend(plan, call, fused_write)


def poison(step: Step) -> None:
    """What no request has in the pages of layer 0 becomes NaN."""
    rows, table = step.pool.key(0), step.batch.page_table
    for request, length in enumerate(step.lengths):
        if used := length % step.pool.page_size:
            rows[int(table[request, length // step.pool.page_size]), used:] = float("nan")


def reference(step: Step) -> Tensor:
    """Of layer 0, in float32: [requests, heads, rank]."""
    rows, size, found = step.pool.key(0), step.pool.page_size, []
    for request, length in enumerate(step.lengths):
        pages = step.batch.page_table[request, : -(-length // size)].long()
        mine = rows[pages].flatten(0, 1)[:length, 0].float()
        scores = step.query[0, request].float() @ mine.T * step.spec.scale
        found.append(scores.softmax(-1) @ mine[:, : step.spec.rank])
    return torch.stack(found)


def checked(step: Step, layer: Layer, expected: Tensor) -> float:
    """The largest error, relative to the largest element; 1 where anything is NaN or missing."""
    step.output[0].fill_(float("nan"))
    layer(0)
    error = (step.output[0, : len(step.lengths)].float() - expected).abs().max() / expected.abs().max()
    return float(error.nan_to_num(1.0))


def microseconds(step: Step, layer: Layer, samples: int) -> float:
    """Of one layer, the median of replays of a graph of all."""
    for index in range(step.layers):
        layer(index)
    if step.device.type != "cuda":
        started = time.perf_counter()
        layer(0)
        return (time.perf_counter() - started) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(step.layers):
            layer(index)
    taken = []
    for _ in range(samples + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(taken[3:]) / step.layers


def steps(heads: int, args: argparse.Namespace, short: bool) -> Iterator[tuple[str, Step]]:
    spec = spec_of(heads)
    for name, lengths in batches(args.smoke).items():
        shorter = [min(length, 130) for length in lengths]
        yield name, Step(spec, shorter if short else lengths, args.page_size, args.dtype, args.device)


def candidates(heads: int, args: argparse.Namespace) -> list[str]:
    """What `tiling.py` says first."""
    return ["", *(args.tilings if args.tilings is not None else TILINGS.get(heads, ()))]


def compile_all(args: argparse.Namespace) -> set[tuple[int, str]]:
    """Processes that each run some candidates on short requests, so that their kernels are on disk. Those that were right, all in time."""
    jobs = [f"{heads}:{each}" for heads in args.heads for each in candidates(heads, args)]
    size = min(args.processes, len(jobs))
    command = [sys.executable, __file__, "--page-size", str(args.page_size)]
    running = [
        subprocess.Popen([*command, "--compile", *jobs[i::size]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in range(size)
    ]
    until, right = time.perf_counter() + args.compile_seconds, set()
    for process in running:
        try:
            said, _ = process.communicate(timeout=max(1.0, until - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            said += "\nkilled: it took too long"
        for line in said.splitlines():
            if line.startswith("right "):
                heads, _, text = line.split()[1].partition(":")
                right.add((int(heads), text))
        if process.returncode or "wrong" in said or "failed" in said:
            print(said[-1500:], flush=True)
    return right


def compile_some(args: argparse.Namespace) -> None:
    for job in args.compile:
        heads, _, text = job.partition(":")
        started, errors = time.perf_counter(), []
        try:
            for _, step in steps(int(heads), args, short=True):
                poison(step)
                errors.append(checked(step, step.layer_of(WithTiling(numbers_of(text))), reference(step)))
        except FAILURES as error:
            print(f"failed {job}: {type(error).__name__}: {str(error).strip()[-300:]}", flush=True)
            continue
        word = "right" if max(errors) <= TOLERANCE else "wrong"
        print(f"{word} {job} errors {' '.join(f'{e:.1e}' for e in errors)}; {time.perf_counter() - started:.0f} s", flush=True)


def others_of(heads: int, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    from paged_attn.backends.selection.registry import backend_class

    if args.device.type != "cuda":
        return {}
    names = [name for name in for_latents(args.device) if name in args.backends.split(",")]
    required = Requirements.of([spec_of(heads)], args.dtype, args.dtype, args.page_size, args.device)
    return {name: backend_class(name) for name in able(names, required)}


def time_candidate(step: Step, text: str, expected: Tensor, samples: int) -> dict[str, Any]:
    layer = step.layer_of(WithTiling(numbers_of(text)))
    error = checked(step, layer, expected)
    if error > TOLERANCE:
        return {"wrong": error}
    whole = microseconds(step, layer, samples)
    alone = step.layer_of(WithTiling(numbers_of(text), merges=False))
    return {"us": whole, "attend_us": microseconds(step, alone, samples), "error": error}


@dataclasses.dataclass
class Prepared:
    heads: int
    name: str
    step: Step
    expected: Tensor


def prepared(args: argparse.Namespace) -> list[Prepared]:
    found = []
    for heads in args.heads:
        for name, step in steps(heads, args, short=False):
            poison(step)
            found.append(Prepared(heads, name, step, reference(step)))
    return found


def time_all(args: argparse.Namespace, right: set[tuple[int, str]] | None, started: float) -> list[dict[str, Any]]:
    """Candidate by candidate, so that a time limit costs the last ones."""
    batches, rows = prepared(args), []
    others = {heads: others_of(heads, args) for heads in args.heads}
    ways = {heads: ["", *others[heads], *candidates(heads, args)[1:]] for heads in args.heads}
    for turn in range(max(map(len, ways.values()))):
        for heads in args.heads:
            if turn >= len(ways[heads]):
                continue
            way = ways[heads][turn]
            made = others[heads].get(way)
            if made is None and right is not None and (heads, way) not in right:
                print(f"{heads} {way or 'tiling.py'}: not timed, it did not run", flush=True)
                continue
            if time.perf_counter() - started > args.seconds:
                print(f"{heads} {way}: not timed, {args.seconds} s are over", flush=True)
                continue
            for each in batches:
                if each.heads != heads:
                    continue
                try:
                    if made is None:
                        row = time_candidate(each.step, way, each.expected, args.samples)
                    else:
                        row = {"us": microseconds(each.step, each.step.layer_of(made()), args.samples)}
                except FAILURES as error:
                    row = {"failed": f"{type(error).__name__}: {str(error).strip()[-200:]}"}
                rows.append({"heads": heads, "batch": each.name, "way": way or "tiling.py", "bytes": each.step.bytes, **row})
                if "us" not in row:
                    print(rows[-1], flush=True)
            write(rows, args)
    return rows


def write(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"gpu": device_name(args.device), "read": args.rate, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]], heads: int, rate: float) -> str:
    """A line for each way, a column for each batch."""
    mine = [row for row in rows if row["heads"] == heads]
    names = list(dict.fromkeys(row["batch"] for row in mine))
    least = {row["batch"]: row["bytes"] / rate * 1e-3 for row in mine}
    lines = [f"{heads} heads; at the read rate: " + ", ".join(f"{name}: {least[name]:.0f}" for name in names)]
    for way in dict.fromkeys(row["way"] for row in mine):
        found = {row["batch"]: row for row in mine if row["way"] == way}
        cells = [_cell(found.get(name, {})) for name in names]
        lines.append(" ".join(cells) + f"  {way}")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    if "us" not in row:
        return f"{'wrong' if 'wrong' in row else '-':>14}"
    inside = f"({row['attend_us']:.1f})" if "attend_us" in row else ""
    return f"{row['us']:6.1f} {inside:>7}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="16,128")
    parser.add_argument("--tilings", nargs="*", help="these in place of TILINGS")
    parser.add_argument("--backends", default="fa3,flash_mla", help="beside ours, where installed")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--compile-seconds", type=float, default=60, help="when the processes that compile are ended")
    parser.add_argument("--seconds", type=float, default=95, help="when no more candidates are begun")
    parser.add_argument("--compile", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="tiny batches, to see that it works")
    parser.add_argument("--out", type=Path, help="a JSON file for all rows")
    args = parser.parse_args(argv)
    args.heads = [int(each) for each in args.heads.split(",")]
    args.device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
    args.dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    if args.device.type != "cuda" and not args.smoke:
        parser.error("there is no GPU; --smoke runs tiny batches on a CPU")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    started = time.perf_counter()
    if args.compile is not None:
        compile_some(args)
        return 0
    right = compile_all(args) if args.device.type == "cuda" else None
    args.rate = ceilings(args.device, args.smoke)["read"]
    print(f"{device_name(args.device)}; memory is read at {args.rate:,.0f} GB/s; {time.perf_counter() - started:.0f} s so far", flush=True)
    rows = time_all(args, right, started)
    for heads in args.heads:
        print(table(rows, heads, args.rate), flush=True)
    print(f"{time.perf_counter() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
