"""Host time of a step's attention, the kernels apart: the op itself, building the batch, and each backend's plan. Writes JSON.

python benchmarks/op_overhead.py [--requests 256] [--pages 64] [--layers 32] [--out benchmarks/results/op_overhead.json]

All are microseconds of the host, medians. On a GPU nothing is waited for within a sample, and there is `launch`: a layer's whole forward,
KV write included.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionBackend, AttentionCall
from paged_attn.backends.attention.capabilities import Capabilities, Problem
from paged_attn.backends.devices import architecture_of, device_name, device_word
from paged_attn.backends.selection.registry import backend_class, backend_names
from paged_attn.backends.selection.requirements import reasons_against

GOALS = {"op": 8.0, "batch": 300.0, "plan": 60.0}  # microseconds; of plans, triton's and fa3's


@dataclass
class NoPlan:
    batch: Batch


class NoOp(AttentionBackend):
    """Does nothing, through the base class's forward: what a call costs before any kernel."""

    name = "no_op"
    capabilities = Capabilities(devices=frozenset({"cpu", "cuda"}), dtypes=frozenset(), kv_dtypes=frozenset(), features=frozenset())

    def plan(self, batch: Batch, pool: KVPool) -> NoPlan:
        return NoPlan(batch)

    def write_kv(self, plan: NoPlan, call: AttentionCall) -> None: ...

    def forward_extend(self, plan: NoPlan, call: AttentionCall) -> None: ...

    def forward_decode(self, plan: NoPlan, call: AttentionCall) -> None: ...


def microseconds(function: Callable[[], object], device: torch.device, calls: int = 1, samples: int = 100) -> float:
    """Host time of one of `calls` calls: the median of the samples, between which the device comes to rest."""
    taken = []
    for _ in range(samples + 5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            function()
        taken.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(taken[5:])


def requests_of(count: int, pages: int, page_size: int, new: int = 1, as_arrays: bool = False) -> list[BatchRequest]:
    """Each has `pages` pages in random order, the last one partly filled."""
    import numpy as np

    ids = random.Random(0).sample(range(1, 1 + count * pages), count * pages)
    rows = [ids[i * pages : (i + 1) * pages] for i in range(count)]
    tables: list[Any] = [np.array(row, dtype=np.int32) for row in rows] if as_arrays else rows
    return [BatchRequest(list(range(new)), table, pages * page_size - new - i % page_size) for i, table in enumerate(tables)]


def op_overhead(spec: AttentionSpec, batch: Batch, pool: KVPool) -> float:
    q, k, v = (torch.zeros(batch.num_rows, heads, spec.qk_head_dim, dtype=pool.dtype, device=pool.device)
               for heads in (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads))  # fmt: skip
    output = torch.empty_like(q)
    with ForwardContext(batch, pool, NoOp()):
        return microseconds(lambda: UNIFIED_ATTENTION(q, k, v, output, 0, True), pool.device, calls=500, samples=20)


def plan_times(name: str, spec: AttentionSpec, batch: Batch, pool: KVPool) -> dict[str, Any]:
    """`plan`, `plan_in_graph` and, on a GPU, `launch`; or why there are none."""
    problem = Problem(spec, pool.dtype, pool.dtype, pool.page_size, device_word(pool.device), architecture_of(pool.device),
                      phases=frozenset({"decode"}))  # fmt: skip
    if reasons := reasons_against(backend_class(name).capabilities, [problem]):
        return {"error": "; ".join(reasons)}
    try:
        backend = backend_class(name)()
    except (ImportError, UnsupportedError) as error:
        return {"error": str(error)}
    plan = backend.plan(batch, pool)
    times: dict[str, Any] = {
        "plan": microseconds(lambda: backend.plan(batch, pool), pool.device),
        "plan_in_graph": microseconds(lambda: backend.plan_in_graph(plan), pool.device),
    }
    if pool.device.type == "cuda":
        q, k, v = (torch.randn(batch.num_rows, heads, spec.qk_head_dim, dtype=pool.dtype, device=pool.device)
                   for heads in (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads))  # fmt: skip
        output = torch.empty_like(q)
        backend.plan_in_graph(plan)
        times["launch"] = microseconds(lambda: backend.forward(plan, 0, spec, q, k, v, output, save_kv_cache=True), pool.device)
    return times


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    spec = AttentionSpec(args.q_heads, args.kv_heads, args.head_dim, args.head_dim, args.head_dim**-0.5)
    decode = requests_of(args.requests, args.pages, args.page_size)
    batch = Batch.build(decode, args.page_size, device)
    layers = [replace(spec, kv_layer=layer) for layer in range(args.layers)]
    pool = KVPool(layers, 1 + args.requests * args.pages, args.page_size, torch.bfloat16, device)
    prompt = requests_of(1, 128, args.page_size, new=2048)
    builds = {
        f"{args.requests} decodes": decode,
        f"{args.requests} decodes, pages as int32 arrays": requests_of(args.requests, args.pages, args.page_size, as_arrays=True),
        "1 decode": decode[:1],
        "1 prompt of 2,048 tokens": prompt,
        f"{args.requests - 1} decodes and a prompt of 2,048 tokens": [*decode[1:], *prompt],
    }
    names = args.backends.split(",") if args.backends else [n for n in backend_names() if n != "reference"]
    return {
        "op": op_overhead(spec, batch, pool),
        "batch": {what: microseconds(lambda r=r: Batch.build(r, args.page_size, device), device) for what, r in builds.items()},
        "backends": {n: plan_times(n, layers[0], batch, pool) for n in names},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("requests", 256), ("pages", 64), ("layers", 32), ("page-size", 16), ("q-heads", 32), ("kv-heads", 8)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--backends", default="", help="comma-separated; default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "op_overhead.json")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = measure(args, device)
    record = {
        "date": datetime.date.today().isoformat(),
        "device": device_name(device),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "conditions": {key: value for key, value in vars(args).items() if isinstance(value, int)},
        "goals": GOALS,
        "microseconds": times,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{device_name(device)}, {args.requests} decodes of {args.pages} pages, {args.layers} layers")
    print(f"{'the op, no kernel':<50}{times['op']:9.1f} us (goal {GOALS['op']:g})")
    for what, value in times["batch"].items():
        print(f"{'Batch.build: ' + what:<50}{value:9.1f} us")
    for name, row in times["backends"].items():
        words = row.get("error") or ", ".join(f"{what} {value:.1f} us" for what, value in row.items())
        print(f"{name:<15}{words}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
