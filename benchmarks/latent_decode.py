"""Times decode steps over rows of latents, attention alone, against the rate at which this GPU reads memory.

python benchmarks/latent_decode.py [--heads 16 --rank 512 --rotated 64 --page-size 64]    # a line per batch and kernel
python benchmarks/latent_decode.py --smoke                                                # tiny batches, on a CPU by torch_native

Rows lie in as many layers as together exceed several times the L2 cache; a pass runs them all, as a captured graph, and a time is that of
one layer. Bytes are the rows, read once. With sgl_kernel there, FlashAttention 3 (queries of latents as `qv`) and FlashMLA (pages of 64)
run beside ours; each result is compared with ours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from kernels import ceilings, ragged_lengths
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.backends.selection.select import select_for_pool

DECODE = ((1, 4096), (8, 4096), (64, 4096), (128, 1024), (1, 131_072))
L2_TIMES = 4
Layer = Callable[[int], None]


def batches(smoke: bool) -> dict[str, list[int]]:
    """Tokens of each request, the new one included, by name."""
    found = {f"{count} x {length:,}": [length] * count for count, length in (((1, 40), (3, 17)) if smoke else DECODE)}
    count = 4 if smoke else 64
    return found | {f"ragged {count}": ragged_lengths(count, 64 if smoke else 16_384)}


class Step:
    """One decode step: `query` [layers, requests, heads, rank + rotated], `output` [layers, requests, heads, rank]."""

    def __init__(self, spec: LatentSpec, lengths: list[int], page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.lengths, self.device = spec, lengths, device
        self.bytes = sum(lengths) * spec.qk_head_dim * dtype.itemsize
        wanted = L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
        self.layers = max(2, -(-wanted // self.bytes))
        counts = [-(-length // page_size) for length in lengths]
        pages = (torch.randperm(sum(counts)) + 1).tolist()
        specs = [spec.__class__(**vars(spec) | {"kv_layer": layer}) for layer in range(self.layers)]
        self.pool = KVPool(specs, sum(counts) + 1, page_size, dtype, device)
        self.pool.storage.normal_()
        requests = [BatchRequest([1], [pages.pop() for _ in range(n)], length - 1, 1) for n, length in zip(counts, lengths, strict=True)]
        self.batch = Batch.build(requests, page_size, device)
        rows = self.batch.num_rows
        self.query = torch.randn(self.layers, rows, spec.num_q_heads, spec.qk_head_dim, dtype=dtype, device=device)
        self.output = self.query.new_empty((*self.query.shape[:3], spec.rank))

    def seconds(self, layer: Layer) -> float:
        """Of one layer: the median of 20 passes."""

        def one_pass() -> None:
            for index in range(self.layers):
                layer(index)

        one_pass()
        if self.device.type != "cuda":
            return _median(one_pass, self.device) / self.layers
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one_pass()
        return _median(graph.replay, self.device) / self.layers

    def ours(self) -> tuple[str, Layer]:
        backend = select_for_pool("triton" if self.device.type == "cuda" else "torch_native", self.pool).backend
        plan = backend.plan(self.batch, self.pool)
        backend.plan_in_graph(plan)

        def layer(index: int) -> None:
            key = self.query[index, :, :1]  # not looked at: the new rows are in the pool
            operands = (self.query[index], key, key[..., : self.spec.rank], self.output[index])
            backend.forward(plan, index, self.pool.layers[index], *operands, save_kv_cache=False)

        return backend.name, layer

    def peers(self) -> dict[str, Layer]:
        """Those whose package is there and that take these sizes."""
        sizes, count = (self.spec.rank, self.spec.rotated), len(self.lengths)
        if self.device.type != "cuda" or sizes != (512, 64):
            return {}
        try:
            from sgl_kernel.flash_attn import flash_attn_with_kvcache
            from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
        except ImportError as error:
            print(f"beside ours: nothing ({error})")
            return {}
        batch, pool, scale, heads = self.batch, self.pool, self.spec.scale, self.spec.num_q_heads
        starts = batch.query_start[: count + 1]

        def fa3(index: int) -> None:
            query, keys = self.query[index, :count], pool.key(index)
            self.output[index, :count] = flash_attn_with_kvcache(
                q=query[..., 512:], k_cache=keys[..., 512:], v_cache=keys[..., :512], qv=query[..., :512], page_table=batch.page_table,
                cache_seqlens=batch.seq_lens, cu_seqlens_q=starts, max_seqlen_q=1, softmax_scale=scale, causal=True,
            )  # fmt: skip

        if pool.page_size != 64:
            return {"fa3, qv": fa3}
        metadata, splits = get_mla_metadata(batch.seq_lens, heads, 1)

        def flash_mla(index: int) -> None:
            query = self.query[index, :count, None]
            found, _ = flash_mla_with_kvcache(
                query, pool.key(index), batch.page_table, batch.seq_lens, 512, metadata, splits, softmax_scale=scale, causal=True
            )
            self.output[index, :count] = found[:, 0]

        return {"fa3, qv": fa3, "flash_mla": flash_mla}


def _median(function: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(25):
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[5:])


def line(name: str, kernel: str, step: Step, seconds: float, rate: float, expected: Tensor) -> str:
    reached = step.bytes / seconds * 1e-9
    count = len(step.lengths)
    error = float((step.output[0, :count] - expected[:count]).abs().max() / expected[:count].abs().max())
    of_rate = f"{reached / rate:6.1%} of what is read at most"
    return f"{name:<16}{kernel:<14}{seconds * 1e6:10,.1f} us {reached:8,.0f} GB/s {of_rate}  differs from ours by {error:.1e}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rank", type=int, default=512)
    parser.add_argument("--rotated", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
    if device.type != "cuda" and not args.smoke:
        parser.error("there is no GPU; --smoke runs tiny batches on a CPU")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spec = LatentSpec(
        args.heads, 1, args.rank + args.rotated, args.rank, 0.1, rotated=args.rotated, key_dim=128, value_dim=128,
        keys=HeadRows(0, 256), values=HeadRows(128, 256),
    )  # fmt: skip
    rate = ceilings(device, args.smoke)["read"]
    print(f"{args.heads} heads over rows of {args.rank} + {args.rotated}; memory is read at {rate:,.0f} GB/s")
    for name, lengths in batches(args.smoke).items():
        step = Step(spec, lengths, args.page_size, dtype, device)
        kernel, ours = step.ours()
        seconds = step.seconds(ours)
        expected = step.output[0].clone()
        print(line(name, kernel, step, seconds, rate, expected), flush=True)
        for peer, layer in step.peers().items():
            print(line(name, peer, step, step.seconds(layer), rate, expected), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
