"""All attention backends side by side in one process, each checked before it is timed: a table and a JSON file.

python benchmarks/kernels.py [--backends triton,fa3,flashinfer] [--only decode] [--deterministic] [--out benchmarks/results/kernels.json]

A time is the median of CUDA graphs' replays, in turns with the other backends', over inputs that rotate through several times the L2
cache (`paged_attn.backends.timing.time_backends`); of all runs, the median. Attention alone, without the KV write, unless --with-write.
Ratios: the time of the faster of flashinfer and fa3 over the row's; bytes (decode, writes) or
operations (prefill) over the ceiling measured here.
--smoke runs tiny shapes anywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.devices import device_name
from paged_attn.backends.selection.packages import PACKAGES, unmet_requirement
from paged_attn.backends.selection.registry import backend_class, backend_names
from paged_attn.backends.timing.inputs import Inputs
from paged_attn.backends.timing.run import WrongResultError, time_all
from paged_attn.backends.timing.time_backends import TimedProblem, Timing, time_backends

PEERS = ("flashinfer", "fa3")
RAGGED = (64, 16_384)  # shortest and longest context of the ragged batches, log-uniform between
CEILING_OF = {"decode": "read", "prefill": "gemm", "kv_write": "copy"}
DECODE = ((1, 4096), (8, 4096), (64, 4096), (128, 1024), (256, 512), (1, 131_072), (32, 16_384))
SHARED = ((16, 2048, 64), (64, 2048, 64), (256, 1024, 128), (64, 8192, 256))  # requests, tokens that all of them share, tokens besides
PREFILL = ((1, 8192, 8192), (8, 1024, 1024), (4, 512, 8192), (1, 128, 32_768))


def shapes(smoke: bool) -> Iterator[tuple[str, str, tuple[tuple[int, int], ...], int]]:
    """Name, kind, (cached, new) of each request, and tokens that all share; decode and prefill as in peers' tables, KV length counting
    the new tokens."""
    for count, length in ((1, 40), (3, 17)) if smoke else DECODE:
        yield f"decode {count} x {length:,}", "decode", ((length - 1, 1),) * count, 0
    for count, shared, own in ((17, 32, 20),) if smoke else SHARED:
        yield f"decode {count} x ({shared:,} shared + {own})", "decode", ((shared + own - 1, 1),) * count, shared
    for count in (4,) if smoke else (32, 64, 128):
        yield f"decode ragged {count}", "decode", tuple((length - 1, 1) for length in ragged_lengths(count, 64 if smoke else RAGGED[1])), 0
    for count, new, length in ((1, 32, 32), (2, 5, 40)) if smoke else PREFILL:
        yield f"prefill {count} x {new:,} x {length:,}", "prefill", ((length - new, new),) * count, 0
    for count in (1, 8) if smoke else (1, 256):
        yield f"kv_write {count}", "kv_write", ((511, 1),) * count, 0
    prompt = 64 if smoke else 8192
    yield f"kv_write {prompt:,}", "kv_write", ((0, prompt),), 0


def ragged_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Log-uniform from RAGGED[0] (or 2) to `longest`, in random order."""
    rng, shortest = random.Random(seed + count), min(RAGGED[0], max(2, longest // 16))
    return [round(math.exp(rng.uniform(math.log(shortest), math.log(longest)))) for _ in range(count)]


def ceilings(device: torch.device, smoke: bool) -> dict[str, float]:
    """GB/s of reading and of copying, and TFLOP/s of a square bf16 matrix product: the best of some ways, each the median of its runs."""
    elements, side = (1 << 20, 256) if smoke else (1 << 30, 8192)
    data, other = torch.ones(elements, device=device), torch.empty(elements, device=device)
    ways: list[Callable[[], object]] = [data.sum, data.amax, lambda: torch.dot(data, data)]
    if device.type == "cuda":
        from read_sweep import read_sweep

        ways.append(lambda: read_sweep(data))
    seconds = {
        "read": min(_seconds(way, device) for way in ways),
        "copy": _seconds(lambda: other.copy_(data), device),
    }
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    gemm = 2 * side**3 / _seconds(lambda: a @ b, device) * 1e-12
    return {"read": elements * 4 / seconds["read"] * 1e-9, "copy": elements * 8 / seconds["copy"] * 1e-9, "gemm": gemm}


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    samples = []
    for _ in range(25):
        if device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            function()
            events[1].record()
            torch.cuda.synchronize()
            samples.append(events[0].elapsed_time(events[1]) * 1e-3)
        else:
            started = time.perf_counter()
            function()
            samples.append(time.perf_counter() - started)
    return statistics.median(samples[5:])


def made_backends(names: Sequence[str], deterministic: bool) -> tuple[dict[str, AttentionBackend], dict[str, str]]:
    """Instances by name, and why there is none of the others."""
    made: dict[str, AttentionBackend] = {}
    reasons: dict[str, str] = {}
    for name in names:
        missing = [r for r in map(unmet_requirement, backend_class(name).capabilities.requirements) if r]
        try:
            if missing:
                raise ImportError("; ".join(missing))
            made[name] = backend_class(name)()
            if deterministic and name == "triton":
                made["triton deterministic"] = backend_class(name)(deterministic=True)
        except (ImportError, UnsupportedError) as error:
            reasons[name] = str(error)
    return made, reasons


def measure(
    name: str, kind: str, problem: TimedProblem, backends: dict[str, AttentionBackend], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each backend."""
    runs: list[dict[str, Timing]] = []
    for _ in range(args.runs):
        if kind == "kv_write":
            runs.append(time_writes(backends, problem, min_ms=args.min_ms, device=args.device))
        else:
            runs.append(
                time_backends(
                    backends, problem, min_ms=args.min_ms, device=args.device, with_write=args.with_write, in_graph_plan=args.plan_in_graph
                )
            )
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
    return [row_of(name, kind, backend, [run[backend] for run in runs]) for backend in backends]


def time_writes(
    backends: Mapping[str, AttentionBackend], problem: TimedProblem, *, min_ms: float, device: torch.device
) -> dict[str, Timing]:
    """As `time_backends`, for `write_kv` alone; bytes are K and V of the new tokens, read and written once."""
    inputs = Inputs.make(problem, device)

    def prepare(backend: AttentionBackend) -> tuple[Callable[[], None], float]:
        plan = backend.plan(inputs.batch, inputs.pool)
        backend.plan_in_graph(plan)
        calls = [inputs.call(layer) for layer in range(inputs.num_sets)]

        def one_pass() -> None:
            for call in calls:
                backend.write_kv(plan, call)

        inputs.poison_new()
        one_pass()
        if wrong := inputs.num_wrong():
            raise WrongResultError(f"{wrong} of {2 * inputs.num_sets * problem.num_tokens} rows were not stored as they were given")
        return one_pass, 0.0

    return time_all(backends, inputs, prepare, min_ms, problem.bytes_written, 0)


def row_of(shape: str, kind: str, backend: str, timings: Sequence[Timing]) -> dict[str, Any]:
    row: dict[str, Any] = {"shape": shape, "kind": kind, "backend": backend}
    if error := next((t.error for t in timings if t.error), None):
        return row | {"error": error}
    middle = sorted(timings, key=lambda t: t.microseconds)[(len(timings) - 1) // 2]
    numbers = {k: v for k, v in dataclasses.asdict(middle).items() if k != "error"}
    return row | numbers | {"run_medians": [t.microseconds for t in timings]}


def add_ratios(rows: list[dict[str, Any]], ceiling: dict[str, float]) -> None:
    peers = [row["microseconds"] for row in rows if row["backend"] in PEERS and "error" not in row]
    for row in rows:
        if "error" not in row:
            reached = row["tflops"] if row["kind"] == "prefill" else row["gbytes_per_s"]
            row["ratio_to_ceiling"] = reached / ceiling[CEILING_OF[row["kind"]]]
            row["ratio_to_best_peer"] = min(peers) / row["microseconds"] if peers and row["kind"] in ("decode", "prefill") else None


def line_of(row: dict[str, Any]) -> str:
    head = f"{row['shape']:<26}{row['backend']:<22}"
    if "error" in row:
        return f"{head}{row['error'].splitlines()[0][:90]}"
    speed = f"{row['tflops']:8,.1f} TFLOP/s" if row["kind"] == "prefill" else f"{row['gbytes_per_s']:8,.0f} GB/s   "
    medians = row["run_medians"]
    apart = max(row["spread"], (max(medians) - min(medians)) / row["microseconds"])
    ratio = "      " if row["ratio_to_best_peer"] is None else f"{row['ratio_to_best_peer']:6.3f}"
    loop = "" if row["graphed"] else "  (no graph)"
    return f"{head}{row['microseconds']:10,.1f} us{speed:>18}{ratio}{row['ratio_to_ceiling']:7.1%} of ceiling  spread {apart:.1%}{loop}"


def summary(rows: Sequence[dict[str, Any]], backends: Sequence[str]) -> str:
    """A Markdown table of microseconds: a line per shape, a column per backend."""
    lines = ["| shape | " + " | ".join(backends) + " |", "|---" * (len(backends) + 1) + "|"]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of = {row["backend"]: row for row in rows if row["shape"] == shape}
        cells = [f"{of[b]['microseconds']:,.1f}" if b in of and "error" not in of[b] else "-" for b in backends]
        lines.append(f"| {shape} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def record_of(args: argparse.Namespace, ceiling: dict[str, float]) -> dict[str, Any]:
    cuda = args.device.type == "cuda"
    versions = {p.module: p.version for p in PACKAGES if p.is_kernels and p.is_installed}
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": device_name(args.device),
        "command": shlex.join(["python", "benchmarks/kernels.py", *args.given]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda, **versions},
        "conditions": {
            "layer": f"{args.q_heads} query heads, {args.kv_heads} KV heads, head dim {args.head_dim}, {args.dtype}",
            "pages": f"of {args.page_size} tokens, in random order",
            "timing": "median of CUDA graph replays" if cuda else "median of plain loops",
            "runs": args.runs,
            "min_ms": args.min_ms,
            "with_write": args.with_write,
            "plan_in_graph": args.plan_in_graph,
            "l2_bytes": torch.cuda.get_device_properties(args.device).L2_cache_size if cuda else None,
        },
        "ceilings": ceiling,
        "shapes": {},
        "rows": [],
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    able = {name: backend_class(name).capabilities for name in backend_names() if name != "reference"}
    usual = [name for name, each in able.items() if not each.latents_only]  # latents: benchmarks/latent_decode.py
    parser.add_argument("--backends", default=",".join(usual), help="comma-separated; default: all that this project can run")
    parser.add_argument("--only", action="append", default=[], help="shapes whose name holds this text; may be repeated")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--runs", type=int, default=2, help="of each shape, with new inputs")
    parser.add_argument("--min-ms", type=float, default=60, help="of samples of each backend in a run")
    parser.add_argument("--deterministic", action="store_true", help="time triton's deterministic mode besides")
    parser.add_argument("--with-write", action="store_true", help="time the KV write of the new tokens too")
    parser.add_argument("--plan-in-graph", action="store_true", help="time plan_in_graph too, once per pass over all layers")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to see that it works")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels.json")
    args = parser.parse_args(argv)
    args.given, args.device = list(argv), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    chosen = [shape for shape in shapes(args.smoke) if not args.only or any(text in shape[0] for text in args.only)]
    if not chosen:
        raise SystemExit(f"--only {args.only} leaves no shape; there are: {', '.join(shape[0] for shape in shapes(args.smoke))}")
    backends, missing = made_backends(args.backends.split(","), args.deterministic)
    record = record_of(args, ceilings(args.device, args.smoke))
    units = {"read": "GB/s", "copy": "GB/s", "gemm": "TFLOP/s"}
    print(f"{record['gpu']}; ceilings: " + ", ".join(f"{k} {v:,.0f} {units[k]}" for k, v in record["ceilings"].items()), flush=True)
    for name, reason in missing.items():
        print(f"{name}: {reason}", flush=True)
    spec = AttentionSpec(args.q_heads, args.kv_heads, args.head_dim, args.head_dim, args.head_dim**-0.5)
    for name, kind, requests, shared in chosen:
        problem = TimedProblem(
            "prefill" if requests[0][1] > 1 else "decode", requests, spec, args.page_size, getattr(torch, args.dtype), shared
        )
        kv = [cached + new for cached, new in requests]
        record["shapes"][name] = {"requests": len(kv), "new": problem.num_tokens, "kv": sum(kv), "shortest": min(kv), "longest": max(kv)}
        rows = measure(name, kind, problem, backends, args)
        rows += [{"shape": name, "kind": kind, "backend": backend, "error": reason} for backend, reason in missing.items()]
        add_ratios(rows, record["ceilings"])
        record["rows"] += rows
        print("\n".join(line_of(row) for row in rows if row["backend"] not in missing), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")  # after each shape: a later one may take the process down
    print("\n" + summary(record["rows"], list(backends)))
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
