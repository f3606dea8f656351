"""What a layer's decode attention adds to a step of one or a few requests, where it stands between two matrix products.

python benchmarks/decode_chain.py [--backend triton] [--layers llama,gpt-oss]

A time is that of a CUDA graph of 12 layers (product, attention, product; their weights are larger than the L2 cache) less that of the
products alone, for a layer. `benchmarks/kernels.py` times attention back to back, where what it reads before the previous kernel has ended
shows nothing.
On a CPU it runs small, for a test, and the figures mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.linear.gemv import one_row_linear
from paged_attn.backends.selection.registry import backend_class
from paged_attn.backends.timing.inputs import Inputs
from paged_attn.backends.timing.problem import LLAMA_8B, TimedProblem

LAYERS = {
    "llama": LLAMA_8B,
    "qwen3-moe": AttentionSpec(32, 4, 128, 128, 128**-0.5),
    "gpt-oss": AttentionSpec(64, 8, 64, 64, 0.125, has_sinks=True),
    "gpt-oss window": AttentionSpec(64, 8, 64, 64, 0.125, sliding_window=128, has_sinks=True),
    "gemma": AttentionSpec(16, 8, 256, 256, 0.0625),
}
STEPS = ((1, 300), (1, 600), (1, 1200), (1, 2400), (1, 5000), (2, 600), (4, 600), (8, 600))  # requests, tokens of each
HIDDEN = 2048


def added(backend: Any, inputs: Inputs, count: int) -> float:
    """Microseconds that attention adds to a layer."""
    spec, device, dtype = inputs.pool.layers[0], inputs.device, inputs.pool.dtype
    heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
    sizes = [number * spec.qk_head_dim for number in heads]
    layers = range(min(12, len(inputs.pool.layers)))
    first = [torch.randn(sum(sizes), HIDDEN, device=device, dtype=dtype) * 0.02 for _ in layers]
    second = [torch.randn(HIDDEN, sizes[0], device=device, dtype=dtype) * 0.02 for _ in layers]
    plan = backend.plan(inputs.batch, inputs.pool)
    backend.plan_in_graph(plan)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        result = one_row_linear(x, weight, None) if count == 1 and x.is_cuda else None
        return torch.nn.functional.linear(x, weight) if result is None else result

    def run(attends: bool) -> Tensor:
        x = torch.ones(count, HIDDEN, device=device, dtype=dtype)
        for i in layers:
            parts = product(x, first[i]).split(sizes, 1)
            query, key, value = (part.view(count, number, -1) for part, number in zip(parts, heads, strict=True))
            output = inputs.output[i] if attends else query
            if attends:
                backend.forward(plan, i, inputs.pool.layers[i], query, key, value, output, save_kv_cache=True, sinks=inputs.sinks)
            x = product(output.reshape(count, -1), second[i])
        return x

    return (_microseconds(lambda: run(True), device) - _microseconds(lambda: run(False), device)) / len(layers)


def _microseconds(run: Callable[[], object], device: torch.device) -> float:
    """The best of five times of eight replays, each."""
    run()
    if device.type != "cuda":
        return 0.0
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(8):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 8 * 1e3)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--layers", default=",".join(LAYERS), help=f"some of {', '.join(LAYERS)}")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, steps = (torch.bfloat16, STEPS) if device.type == "cuda" else (torch.float32, ((1, 40),))
    backend = backend_class(args.backend)()
    for name in args.layers.split(","):
        for count, length in steps:
            problem = TimedProblem("decode", ((length - 1, 1),) * count, LAYERS[name], dtype=dtype)
            print(f"{name:15} {count} x {length:<6,} {added(backend, Inputs.make(problem, device), count):6.2f} us", flush=True)


if __name__ == "__main__":
    main()
