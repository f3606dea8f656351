"""A layer of experts at published shapes, without its router: microseconds by number of tokens, ours beside transformers' grouped_mm and
vLLM's, and beside what reading the chosen experts once takes.

    python benchmarks/experts.py --json out.json                 every shape, as `experts_on_gpu` chooses
    python benchmarks/experts.py --tune --shape qwen3-30b-a3b    every tiling, best first
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_attn.attn_ops.ops.experts import experts_one_by_one
from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.experts.on_gpu import experts_on_gpu
from paged_attn.backends.experts.triton.few import FewTiling, few_experts
from paged_attn.backends.experts.triton.grouped import GroupedTiling, grouped_experts

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)
Run = Callable[[], Tensor]


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


def milliseconds(run: Run) -> float:
    """Median time of a replay of a CUDA graph; on a CPU of a call, which shows nothing but that it works."""
    if not torch.cuda.is_available():
        import time

        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    import triton

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(triton.testing.do_bench(graph.replay, warmup=10, rep=40, return_mode="median"))


def error(expected: Tensor, given: Tensor) -> float:
    return float((expected.double() - given.double()).norm() / expected.double().norm())


def few_tilings() -> Iterator[FewTiling]:
    """A dozen: each compiles for seconds, and a kernel that waits for memory does not mind much."""
    for (rows, columns), warps in itertools.product(((4, 512), (8, 256), (8, 512), (16, 256), (16, 512), (32, 256)), (4, 8)):
        yield FewTiling(rows, columns, warps, rows, columns, warps)


def grouped_tilings(tokens: int, shape: Shape) -> Iterator[GroupedTiling]:
    rows = tokens * shape.top_k / shape.experts  # of an expert
    for m, n, k in ((16, 32, 128), (16, 64, 128), (16, 128, 64), (32, 64, 128), (32, 128, 64), (64, 64, 64), (64, 128, 64), (64, 256, 64),
                    (128, 128, 64), (128, 256, 64)):  # fmt: skip
        if m == 16 or rows / 4 <= m <= 4 * rows:
            yield from (GroupedTiling(m, n, k, warps, stages) for warps in ((8,) if m * n >= 128 * 128 else (4,)) for stages in (3, 4))


def measured(layer: Layer, tokens: int, rate: float) -> dict[str, Any]:
    operands = layer.operands(tokens)
    expected = experts_one_by_one(*operands)
    systems: dict[str, Run] = {
        "ours": lambda: experts_on_gpu(*operands) if torch.cuda.is_available() else experts_one_by_one(*operands),
        "grouped_mm": transformers_grouped(operands),
    }
    if importlib.util.find_spec("vllm") and layer.b1 is None and not layer.shape.is_transposed:
        systems["vllm"] = vllm_fused(operands)
    row: dict[str, Any] = {"tokens": tokens, "floor_us": round(layer.floor_us(operands[1], rate), 1)}
    for name, run in systems.items():
        row[f"{name}_error"] = round(error(expected, run()), 5)
        row[f"{name}_us"] = round(1e3 * milliseconds(run), 1)
    return row


def tuned(layer: Layer, tokens: int) -> list[dict[str, Any]]:
    """Every tiling of both kernels that compiles and fits, fastest first."""
    from triton.runtime.errors import OutOfResources

    operands = layer.operands(tokens)
    runs: list[tuple[str, Any, Run]] = []
    if tokens <= 64:
        runs += [("few", t, functools.partial(few_experts, *operands, tiling=t)) for t in few_tilings()]
    runs += [("grouped", t, functools.partial(grouped_experts, *operands, tiling=t)) for t in grouped_tilings(tokens, layer.shape)]
    found = []
    for kind, tiling, run in runs:
        try:
            found.append({"us": round(1e3 * milliseconds(run), 1), "kind": kind, "tiling": vars(tiling)})
        except OutOfResources:
            continue
    return sorted(found, key=lambda row: row["us"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rate", type=float, default=4.632e12, help="bytes per second of memory, measured (an H200)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    results: dict[str, Any] = {}
    for name in options.shape:
        layer = Layer(SHAPES[name], torch.bfloat16 if cuda else torch.float32, "cuda" if cuda else "cpu")
        for tokens in options.tokens:
            row = {"best": tuned(layer, tokens)[:5]} if options.tune else measured(layer, tokens, options.rate)
            results.setdefault(name, []).append({"tokens": tokens, **row})
            print(name, json.dumps(results[name][-1]), flush=True)
        del layer
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
