"""Times the two ways of latent attention (absorbed, expanded) of one layer against what `step.expands` would take.

python benchmarks/latent.py [--device cuda --dtype bfloat16 --heads 16 [--pytorch]]    # per shape milliseconds of both, and the choice

latent_decode.py times decode steps on a GPU.

A request of `new` tokens extends `cached` ones. The factor that makes the operations of both agree with their times is printed last;
`step.expands` counts with 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.latent import LATENT_ATTENTION
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.latent import step
from paged_attn.backends.attention.triton.backend import TritonBackend
from paged_attn.backends.selection.select import select_for_pool

SHAPES = ((1, 512), (8, 512), (64, 512), (256, 512), (64, 0), (256, 0), (1024, 0), (16, 4096), (128, 4096), (512, 4096))
LONGER = ((4096, 0), (8192, 0), (2048, 8192), (8192, 24_576))  # on a GPU besides
PAGE_SIZE = 16


def milliseconds(spec: LatentSpec, new: int, cached: int, expand: bool, dtype: torch.dtype, device: torch.device) -> float:
    """Of one layer; the median of five."""
    pages = -(-(new + cached) // PAGE_SIZE)
    pool = KVPool([spec], pages + 1, PAGE_SIZE, dtype, device)
    batch = Batch.build([BatchRequest([1] * new, list(range(1, pages + 1)), cached, 1)], PAGE_SIZE, device)
    rows, heads = batch.num_rows, spec.num_q_heads
    weight = torch.randn(heads * (spec.key_dim + spec.value_dim), spec.rank, device=device, dtype=dtype) * 0.02
    query = torch.randn(rows, heads, spec.key_dim + spec.rotated, device=device, dtype=dtype)
    row = torch.randn(rows, spec.qk_head_dim, device=device, dtype=dtype)
    output = query.new_empty((rows, heads, spec.value_dim))
    backend, chosen, taken = select_for_pool("triton" if device.type == "cuda" else "auto", pool).backend, step.expands, []
    step.expands = lambda *_: expand
    try:
        for _ in range(6):
            started = time.perf_counter()
            with ForwardContext(batch, pool, backend):
                LATENT_ATTENTION(query, row[:, : spec.rank], row[:, spec.rank :], weight, weight, output, 0)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            taken.append((time.perf_counter() - started) * 1e3)
    finally:
        step.expands = chosen
    return statistics.median(taken[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument(
        "--pytorch", action="store_true", help="expanded: by PyTorch's attention, also where the backend has a kernel for it"
    )
    args = parser.parse_args()
    if args.pytorch:
        TritonBackend.attends_expanded = AttentionBackend.attends_expanded
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    spec = LatentSpec(
        args.heads, 1, 576, 512, 0.1, rotated=64, key_dim=128, value_dim=128, keys=HeadRows(0, 256), values=HeadRows(128, 256)
    )
    costs = []
    print(f"{'new':>5} {'cached':>6} {'absorbed ms':>11} {'expanded ms':>11}  takes")
    for new, cached in SHAPES + (LONGER if device.type == "cuda" else ()):
        absorbed, expanded = (milliseconds(spec, new, cached, expand, dtype, device) for expand in (False, True))
        takes = "expanded" if step.expands(spec, new, cached) else "absorbed"
        print(f"{new:5} {cached:6} {absorbed:11.2f} {expanded:11.2f}  {takes}", flush=True)
        if new > 1:
            operations = step.absorbed_operations(spec, new, cached) / step.expanded_operations(spec, new, cached)
            costs.append(absorbed / expanded / operations)
    print(f"absorbed operations cost {statistics.median(costs):.2f} of expanded ones, {min(costs):.2f} to {max(costs):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
