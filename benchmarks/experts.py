"""A layer of experts at published shapes, without its router: microseconds by number of tokens, ours beside transformers' grouped_mm and
vLLM's, and beside what reading the chosen experts once takes.

    python benchmarks/experts.py --json out.json                 every shape, as the Triton backend chooses
    python benchmarks/experts.py --beside sgl_kernel flashinfer  those backends, too; flashinfer, where it may, with up before gate
    python benchmarks/experts.py --tune --shape qwen3-30b-a3b    every tiling, best first
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_attn.attn_ops.ops.experts import experts_one_by_one
from paged_attn.attn_ops.specs.experts import ExpertsSpec, Gating
from paged_attn.backends.experts.base import ExpertsProblem
from paged_attn.backends.experts.triton.backend import TritonExpertsBackend
from paged_attn.backends.experts.triton.few import FewTiling, few_experts
from paged_attn.backends.experts.triton.grouped import ONE_PROGRAM, GroupedTiling, grouped_experts
from paged_attn.backends.selection.experts import BUILT_IN, experts_backend, reasons_against

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)
Run = Callable[[], Tensor]
KERNELS: dict[str, Callable[..., Tensor]] = {"few": few_experts, "grouped": grouped_experts}


class Shape(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    width: int
    gating: Gating = Gating()
    has_bias: bool = False
    is_transposed: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, Gating("silu", True, True, 7.0, 1.702), True, True),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "qwen3-next": Shape(512, 10, 2048, 512),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
}


class Layer:
    """Random weights, and inputs for any number of tokens."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        rows = shape.width * (1 + shape.gating.gated)
        self.w1, self.w2 = self._weight(rows, shape.hidden), self._weight(shape.hidden, shape.width)
        self.b1 = torch.randn(shape.experts, rows, dtype=dtype, device=device) if shape.has_bias else None
        self.b2 = torch.randn(shape.experts, shape.hidden, dtype=dtype, device=device) if shape.has_bias else None

    def _weight(self, rows: int, columns: int) -> Tensor:
        size = (columns, rows) if self.shape.is_transposed else (rows, columns)
        weight = torch.empty((self.shape.experts, *size), dtype=self.dtype, device=self.device).normal_(0, columns**-0.5)
        return weight.transpose(1, 2) if self.shape.is_transposed else weight

    def operands(self, tokens: int) -> tuple[Any, ...]:
        x = torch.randn(tokens, self.shape.hidden, dtype=self.dtype, device=self.device)
        scores, ids = torch.rand(tokens, self.shape.experts, device=self.device).topk(self.shape.top_k, dim=1)
        weights = (scores / scores.sum(1, keepdim=True)).to(self.dtype)
        return x, ids, weights, self.w1, self.w2, self.b1, self.b2, self.shape.gating

    def several(self, tokens: int) -> list[tuple[Any, ...]]:
        """As many as read more than a cache holds."""
        return [self.operands(tokens) for _ in range(6 if tokens <= 64 else 1)]

    def floor_us(self, ids: Tensor, bytes_per_second: float) -> float:
        """Reading every chosen expert once."""
        each = (self.w1[0].numel() + self.w2[0].numel()) * self.w1.element_size()
        return 1e6 * len(ids.unique()) * each / bytes_per_second


def transformers_grouped(operands: tuple[Any, ...]) -> Run:
    from transformers.integrations.moe import grouped_mm_experts_forward

    x, ids, weights, w1, w2, b1, b2, gating = operands
    module = argparse.Namespace(
        num_experts=len(w1), has_gate=gating.gated, has_bias=b1 is not None, is_transposed=False, has_post_expert_norm=False,
        _is_expert_parallel=False, gate_up_proj=w1, up_proj=w1, down_proj=w2, gate_up_proj_bias=b1, up_proj_bias=b1, down_proj_bias=b2,
        _apply_gate=gating, act_fn=gating,
    )  # fmt: skip
    return lambda: grouped_mm_experts_forward(module, x, ids, weights)


def vllm_fused(operands: tuple[Any, ...]) -> Run:
    """vLLM's Triton experts; it knows silu(gate) * up without biases here."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    x, ids, weights, w1, w2, *_ = operands
    return lambda: fused_experts(x, w1, w2, weights.float(), ids.to(torch.int32))


def milliseconds(runs: Sequence[Run]) -> float:
    """Of one run: the median of replays of a CUDA graph of all, each with experts of its own, so that none finds its weights in the cache.
    On a CPU the time of a call, which shows nothing but that it works."""
    if not torch.cuda.is_available():
        import time

        started = time.perf_counter()
        runs[0]()
        return 1e3 * (time.perf_counter() - started)
    import triton

    runs[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return float(triton.testing.do_bench(graph.replay, warmup=5, rep=20, return_mode="median")) / len(runs)


def error(expected: Tensor, given: Tensor) -> float:
    return float((expected.double() - given.double()).norm() / expected.double().norm())


def few_tilings(shape: Shape) -> Iterator[FewTiling]:
    """A dozen: each compiles for seconds, and a kernel that waits for memory does not mind much."""
    tall = ((32, 64), (64, 32), (64, 64), (128, 32), (32, 32))  # a column of a transposed weight is what lies together
    wide = ((2, 1024), (4, 512), (8, 256), (8, 512), (16, 256), (16, 512), (32, 256))
    for rows, columns in tall if shape.is_transposed else wide:
        yield from (FewTiling(rows, columns, warps, rows, columns, warps) for warps in (4, 8))


def grouped_tilings(tokens: int, shape: Shape) -> Iterator[GroupedTiling]:
    rows = tokens * shape.top_k / shape.experts  # of an expert
    blocks = [(16, 32, 128), (16, 32, 256), (16, 64, 128), (16, 64, 256), (16, 128, 64), (16, 128, 128), (32, 64, 128), (32, 128, 64)]
    for m, n, k in (*blocks, (64, 64, 64), (64, 128, 64), (64, 256, 64), (128, 64, 64), (128, 128, 64), (128, 256, 64)):
        if rows <= 32 if m == 16 else rows / 4 <= m <= 4 * rows:
            for warps in (4, 8) if m * n >= 64 * 128 else (4,):
                yield from (GroupedTiling(m, n, k, warps, stages) for stages in ((3, 4, 5) if m == 16 else (3, 4)))


def tilings(tokens: int, shape: Shape) -> list[tuple[str, Any]]:
    few = [("few", tiling) for tiling in few_tilings(shape)] if tokens <= 16 else []
    return few + [("grouped", tiling) for tiling in grouped_tilings(tokens, shape)]


def compile_each(name: str, own: list[tuple[bool, str, Any]]) -> None:
    """In a process of its own: Triton keeps what it compiles on disk."""
    layer = layer_of(name)
    operands = {starts_early: layer.operands(16 if starts_early else ONE_PROGRAM) for starts_early in {early for early, *_ in own}}
    for starts_early, kind, tiling in own:
        with contextlib.suppress(triton_out_of_resources()):
            KERNELS[kind](*operands[starts_early], tiling=tiling)


def beside(name: str, layer: Layer, given: Sequence[tuple[Any, ...]]) -> tuple[list[Run], Gating] | str:
    """A backend's runs and the gate that it ran with, or why it cannot run: the same weights are read with up before gate, if it must."""
    shape = layer.shape
    for gating in (shape.gating, dataclasses.replace(shape.gating, up_first=True)):
        spec = ExpertsSpec(shape.experts, shape.hidden, shape.width, gating, shape.has_bias)
        reasons = reasons_against(name, ExpertsProblem.of(spec, layer.w1, layer.w2))
        if not reasons:
            return [functools.partial(experts_backend(name).forward, *operands[:-1], gating) for operands in given], gating
    return "; ".join(reasons)


@contextlib.contextmanager
def tuning(names: Sequence[str]) -> Iterator[None]:
    """Inside, FlashInfer tries its tiles."""
    if "flashinfer" in names and importlib.util.find_spec("flashinfer"):
        from flashinfer.autotuner import autotune

        with autotune(True):
            yield
    else:
        yield


def measured(layer: Layer, tokens: int, rate: float, names: Sequence[str] = ()) -> dict[str, Any]:
    given = layer.several(tokens)
    expected = experts_one_by_one(*given[0])
    ours = TritonExpertsBackend().forward if torch.cuda.is_available() else experts_one_by_one
    systems: dict[str, list[Run]] = {
        "ours": [functools.partial(ours, *operands) for operands in given],
        "grouped_mm": [transformers_grouped(operands) for operands in given],
    }
    if importlib.util.find_spec("vllm") and layer.b1 is None and not layer.shape.is_transposed:
        systems["vllm"] = [vllm_fused(operands) for operands in given]
    floor = sum(layer.floor_us(operands[1], rate) for operands in given) / len(given)
    row: dict[str, Any] = {"tokens": tokens, "floor_us": round(floor, 1)}
    for name, runs in systems.items():
        row[f"{name}_error"] = round(error(expected, runs[0]()), 5)
        row[f"{name}_us"] = round(1e3 * milliseconds(runs), 1)
    for name in names:
        other = beside(name, layer, given)
        if isinstance(other, str):
            row[f"{name}_refused"] = other
            continue
        runs, gating = other
        with tuning(names):
            runs[0]()
        row[f"{name}_error"] = round(error(experts_one_by_one(*given[0][:-1], gating), runs[0]()), 5)
        row[f"{name}_us"] = round(1e3 * milliseconds(runs), 1)
    return row


def tuned(layer: Layer, tokens: int) -> list[dict[str, Any]]:
    """The fastest tilings of each kernel, of those that fit."""
    given = layer.several(tokens)
    found: dict[str, list[dict[str, Any]]] = {"few": [], "grouped": []}
    for kind, tiling in tilings(tokens, layer.shape):
        with contextlib.suppress(triton_out_of_resources()):
            us = 1e3 * milliseconds([functools.partial(KERNELS[kind], *operands, tiling=tiling) for operands in given])
            found[kind].append({"us": round(us, 1), "kind": kind, "tiling": list(vars(tiling).values())})
    return [row for rows in found.values() for row in sorted(rows, key=lambda row: row["us"])[:5]]


def triton_out_of_resources() -> type[Exception]:
    from triton.runtime.errors import OutOfResources

    return OutOfResources


def layer_of(name: str) -> Layer:
    cuda = torch.cuda.is_available()
    return Layer(SHAPES[name], torch.bfloat16 if cuda else torch.float32, "cuda" if cuda else "cpu")


def compile_all(name: str, tokens: Iterable[int], jobs: int) -> None:
    shape = SHAPES[name]
    every = list(dict.fromkeys((count * shape.top_k <= ONE_PROGRAM, *each) for count in tokens for each in tilings(count, shape)))
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(functools.partial(compile_each, name), [every[start::jobs] for start in range(jobs)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--beside", nargs="*", default=[], choices=BUILT_IN, help="backends that are measured, too")
    parser.add_argument("--rate", type=float, default=4.632e12, help="bytes per second of memory, measured (an H200)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile tilings")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.shape:
        if options.tune and options.jobs > 1:
            compile_all(name, options.tokens, options.jobs)
        layer = layer_of(name)
        for tokens in options.tokens:
            row = {"best": tuned(layer, tokens)} if options.tune else measured(layer, tokens, options.rate, options.beside)
            results.setdefault(name, []).append({"tokens": tokens, **row})
            print(name, json.dumps(results[name][-1]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1))
        del layer


if __name__ == "__main__":
    main()
