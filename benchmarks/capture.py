"""Decode and prefill steps of one model, captured in several ways, against the floor of reading weights and KV. Writes JSON.

python benchmarks/capture.py [--modes eager eager_break eager_full full full_merged ...] [--batches 1 8 32 128] [--context 512]
    [--out benchmarks/results/capture.json]
python benchmarks/capture.py --startup full_default [--out FILE]     seconds from the model to the first token; once cold, once warm

The model has Llama-3.1-8B's shape, random weights and bfloat16 (`--smoke`: a tiny one, on the CPU, without graphs). A decode step is timed
from its batch to its logits and their argmax, 40 steps in a row without waiting in between; host is the time until the last of them was
handed to the GPU. The floor reads each weight but the embedding's, and the KV of all requests, once, at the read bandwidth measured here.
`kernels` sums the kernels of one step, as the profiler sees them.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import logging
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from kernels import ceilings

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.batch.batch import BatchRequest
from paged_attn.bench.shapes import SHAPES
from paged_attn.bench.systems.model_source import random_model
from paged_attn.engine.engine import Engine
from paged_attn.engine.steps.step_runner import StepOutput

PLAIN = {"gemv": False, "pdl": False}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"compile": False, "graphs": "off"},
    "eager_break": {"compile": False, "graphs": "piecewise"},
    "eager_full": {"compile": False, "graphs": "full"},
    "compiled": {"graphs": "off", **PLAIN, "merge_linears": False},
    "pieces": {"graphs": "piecewise", **PLAIN, "merge_linears": False},
    "full": {"graphs": "full", **PLAIN, "merge_linears": False},
    "full_merged": {"graphs": "full", **PLAIN},
    "full_early": {"graphs": "full", "gemv": False},
    "full_one_row": {"graphs": "full", "pdl": False},
    "full_default": {"graphs": "full"},
}
STEPS, ROUNDS = 40, 3


def make_model(smoke: bool) -> Any:
    """Random weights of the shape, on the GPU where there is one."""
    shape, dtype, device = ("tiny", "float32", "cpu") if smoke else ("llama-3.1-8b", "bfloat16", "cuda")
    return random_model(transformers.AutoConfig.for_model(**SHAPES[shape]), dtype, device)


@contextlib.contextmanager
def engine_of(model: Any, mode: str, args: argparse.Namespace) -> Iterator[Engine]:
    pages = max(args.batches) * (-(-args.context // 16) + 2) + 8
    settings = {**MODES[mode], "num_pages": pages, "max_requests": max(args.batches), "max_batch_tokens": args.rows}
    if args.backend:
        settings["backend"] = args.backend
    if args.smoke:
        settings["graphs"] = "off"
    llm = LLM(model, **settings)
    try:
        yield llm.engine
    finally:
        llm.close()
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def decode_requests(engine: Engine, count: int, context: int) -> list[BatchRequest]:
    """`count` requests with `context` tokens after this step, on pages in random order; the pool holds finite numbers."""
    per_request = -(-context // engine.config.page_size)
    order = (torch.randperm(engine.pool.num_pages - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    return [BatchRequest([7 + i % 50], order[i * per_request : (i + 1) * per_request], context - 1) for i in range(count)]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def best_of(output: StepOutput) -> torch.Tensor:
    return output.logits.argmax(-1) if output.greedy_tokens is None else output.greedy_tokens


def time_steps(engine: Engine, requests: Sequence[BatchRequest], steps: int) -> dict[str, Any]:
    """Milliseconds per step and microseconds of host time, the medians of some rounds."""
    runner, wall, host, prepare = engine.step_runner, [], [], []
    for warm in (True, *(False,) * ROUNDS):
        synchronize()
        started, preparing = time.perf_counter(), 0.0
        for _ in range(3 if warm else steps):
            before = time.perf_counter()
            step = runner.prepare(requests)
            preparing += time.perf_counter() - before
            ids = best_of(runner.run(step))
        handed = time.perf_counter()
        synchronize()
        if not warm:
            wall.append((time.perf_counter() - started) / steps * 1e3)
            host.append((handed - started) / steps * 1e6)
            prepare.append(preparing / steps * 1e6)
    assert ids.shape[0] == sum(r.num_logits for r in requests)
    mode = step.captured.key.mode if step.captured else "uncaptured"
    return {"ms": statistics.median(wall), "host_us": statistics.median(host), "prepare_us": statistics.median(prepare), "ran": mode}


def profile(engine: Engine, requests: Sequence[BatchRequest]) -> dict[str, Any]:
    """The kernels of one step: their sum in ms, and the largest by name."""
    runner, names = engine.step_runner, Counter[str]()
    counts = Counter[str]()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            best_of(runner.run(runner.prepare(requests)))
        torch.cuda.synchronize()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            names[event.name[:90]] += event.device_time / 3
            counts[event.name[:90]] += 1
    top = [{"name": name, "us": round(us, 1), "calls": counts[name] // 3} for name, us in names.most_common(16)]
    return {"kernels_ms": sum(names.values()) / 1e3, "top": top}


def address_check_us(engine: Engine) -> float:
    """Microseconds of the check of all tensors' addresses before a replay."""
    check, started = engine.step_runner._pointer_check.check, time.perf_counter()
    for _ in range(200):
        check()
    return (time.perf_counter() - started) / 200 * 1e6


def floor_ms(model: Any, requests: Sequence[BatchRequest], engine: Engine, read: float) -> float:
    """Weights and KV at the read bandwidth, GB/s."""
    table = model.get_input_embeddings().weight
    weights = sum(p.nbytes for p in model.parameters() if p is not table)
    tokens = sum(r.num_cached + 1 for r in requests)
    kv = tokens * engine.pool.page_elements // engine.config.page_size * engine.pool.dtype.itemsize
    return (weights + kv) / read / 1e6


def measure(args: argparse.Namespace) -> dict[str, Any]:
    model = make_model(args.smoke)
    ceiling = ceilings(next(model.parameters()).device, args.smoke)
    results: dict[str, Any] = {"ceilings": ceiling, "modes": {}}
    for mode in args.modes:
        with engine_of(model, mode, args) as engine:
            engine.pool.storage.normal_()
            report = engine.step_runner.report()
            rows: dict[str, Any] = {
                "start_seconds": engine.start_seconds, "backend": engine.selection.backend.name, "graph_mib": report.nbytes / 2**20,
                "capture": report.lines(), "decode": {}, "extend": {},
            }  # fmt: skip
            for count in args.batches:
                requests = decode_requests(engine, count, args.context)
                row = time_steps(engine, requests, STEPS)
                row["floor_ms"] = floor_ms(model, requests, engine, ceiling["read"])
                row["of_floor"] = row["floor_ms"] / row["ms"]
                rows["decode"][count] = row
                print(
                    f"{mode:13} decode {count:4}: {row['ms']:7.3f} ms ({row['of_floor']:.3f} of the floor {row['floor_ms']:.3f})  "
                    f"host {row['host_us']:6.0f} us, of it batch {row['prepare_us']:4.0f}  {row['ran']}", flush=True,
                )  # fmt: skip
            for tokens in args.prompts:
                rows["extend"][tokens] = row = time_steps(engine, prompt_of(tokens), 8)
                print(f"{mode:13} prompt {tokens:4}: {row['ms']:7.3f} ms  host {row['host_us']:6.0f} us  {row['ran']}", flush=True)
            if engine.step_runner.graphs is not None:
                rows["address_check_us"] = address_check_us(engine)
            print("\n".join([*rows["capture"], f"  {engine.start_seconds} {rows.get('address_check_us')}"]), flush=True)
            results["modes"][mode] = rows
            write(args, results)  # after each mode: a run that is cut off leaves what it has
    if not args.smoke:
        profile_modes(model, args, results)
    return results


def profile_modes(model: Any, args: argparse.Namespace, results: dict[str, Any]) -> None:
    """After all timing: once a process has used the profiler, its steps seem to take 1 to 3 % longer."""
    for mode in args.profiles:
        if mode not in results["modes"]:
            continue
        with engine_of(model, mode, args) as engine:
            engine.pool.storage.normal_()
            rows = results["modes"][mode]
            for count in sorted({args.batches[0], max(args.batches)}):
                rows["decode"][count] |= profile(engine, decode_requests(engine, count, args.context))
                print(f"{mode:13} decode {count:4}: kernels {rows['decode'][count]['kernels_ms']:.3f} ms", flush=True)
            rows["extend"][max(args.prompts)] |= profile(engine, prompt_of(max(args.prompts)))
        write(args, results)


def prompt_of(tokens: int) -> list[BatchRequest]:
    return [BatchRequest([5] * tokens, list(range(1, 1 + -(-tokens // 16))))]


def write(args: argparse.Namespace, results: dict[str, Any]) -> None:
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**conditions(args), **results}, indent=1) + "\n")


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(), "torch": torch.__version__, "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU",
        "context": args.context, "module_loading": os.environ.get("CUDA_MODULE_LOADING", "LAZY"),
    }  # fmt: skip


def measure_startup(args: argparse.Namespace) -> dict[str, Any]:
    model = make_model(args.smoke)
    synchronize()
    started = time.perf_counter()
    with engine_of(model, args.startup, args) as engine:
        ready = time.perf_counter() - started
        request = engine.add_request(list(range(1, 65)), SamplingParams(max_new_tokens=2, ignore_eos=True))
        engine.step()
        synchronize()
        first = time.perf_counter() - started
        while engine.has_work:
            engine.step()
        assert request.num_sampled == 2
        parts = dict(engine.start_seconds)
        graphs = parts.pop("graphs and pool")
        row = {
            "ready": ready, "first_token": first, "model": sum(parts.values()), "graphs and pool": graphs, "parts": parts,
            "capture": engine.step_runner.report().lines(),
        }  # fmt: skip
        if engine.step_runner.graphs is not None:
            row["shapes"] = {str(key): round(captured.seconds, 3) for key, captured in engine.step_runner.graphs.captured.items()}
    print(f"startup {args.startup}: " + ", ".join(f"{k} {v:.1f} s" for k, v in row.items() if isinstance(v, float)))
    print("\n".join(row["capture"]))
    return {"startup": {args.startup: row}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--profiles", nargs="*", choices=MODES, default=["eager_full", "full_default"], help="modes whose kernels are listed"
    )
    parser.add_argument("--startup", choices=MODES)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--context", type=int, default=512, help="tokens of each request after the step")
    parser.add_argument("--rows", type=int, default=2048, help="max_batch_tokens")
    parser.add_argument("--backend", default="", help="attention backend")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU: whether it runs, no figures")
    parser.add_argument("--log", action="store_true", help="the package's log, with milliseconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.log:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s")
    write(args, measure_startup(args) if args.startup else measure(args))


if __name__ == "__main__":
    main()
