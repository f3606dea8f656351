"""Times decode steps over rows of latents, attention alone, against the rate at which this GPU reads memory.

python benchmarks/latent_decode.py [--heads 16 --rank 512 --rotated 64 --page-size 64]    # a line per batch and backend
python benchmarks/latent_decode.py --backends triton,fa3 --dtype float16                  # only these; the first is what others differ from
python benchmarks/latent_decode.py --smoke                                                # tiny batches, on a CPU by torch_native

Rows lie in as many layers as together exceed several times the L2 cache; a pass runs them all, as a captured graph, and a time is that of
one layer. Bytes are the rows, read once. All backends run that have kernels for latents and fit: the device, the sizes, the packages. What
does not fit is said with its reasons.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from kernels import ceilings, ragged_lengths
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.capabilities import Feature
from paged_attn.backends.selection.registry import backend_class, backend_names
from paged_attn.backends.selection.requirements import Requirements

DECODE = ((1, 4096), (8, 4096), (64, 4096), (128, 1024), (1, 131_072))
L2_TIMES = 4
Layer = Callable[[int], None]


def batches(smoke: bool) -> dict[str, list[int]]:
    """Tokens of each request, the new one included, by name."""
    found = {f"{count} x {length:,}": [length] * count for count, length in (((1, 40), (3, 17)) if smoke else DECODE)}
    count = 4 if smoke else 64
    return found | {f"ragged {count}": ragged_lengths(count, 64 if smoke else 16_384)}


def spec_of(heads: int, rank: int = 512, rotated: int = 64) -> LatentSpec:
    keys, values = HeadRows(0, 256), HeadRows(128, 256)
    return LatentSpec(heads, 1, rank + rotated, rank, 0.1, rotated=rotated, key_dim=128, value_dim=128, keys=keys, values=values)


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

    def layer_of(self, backend: AttentionBackend) -> Layer:
        """Its attention of one layer, planned for this step as for a captured graph.

        Raises:
            ImportError, UnsupportedError: it cannot be loaded, or not run these sizes.
        """
        count = len(self.lengths)
        planned = backend.for_graph(count, count * self.batch.page_table.shape[1])
        plan = planned.plan(self.batch, self.pool)
        planned.plan_in_graph(plan)

        def layer(index: int) -> None:
            key = self.query[index, :, :1]  # not looked at: the new rows are in the pool
            operands = (self.query[index], key, key[..., : self.spec.rank], self.output[index])
            planned.forward(plan, index, self.pool.layers[index], *operands, save_kv_cache=False)

        return layer


def able(names: Sequence[str], required: Requirements) -> list[str]:
    """Those of these backends that decode over the rows, and a line for each other one."""
    against = {name: required.reasons(name, frozenset({"decode"})) for name in names}
    for name, reasons in against.items():
        if reasons:
            print(f"without {name}: {'; '.join(reasons)}")
    return [name for name in names if not against[name]]


def for_latents(device: torch.device) -> list[str]:
    """Backends with kernels for latents, ours first; PyTorch alone on a CPU."""
    if device.type != "cuda":
        return ["torch_native"]
    found = {name: backend_class(name).capabilities for name in backend_names() if name not in ("triton", "torch_native", "reference")}
    return ["triton", *(name for name, each in found.items() if Feature.MLA in each.features)]


def _median(function: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(25):
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[5:])


def line(name: str, kernel: str, step: Step, seconds: float, rate: float, first: tuple[str, Tensor]) -> str:
    reached = step.bytes / seconds * 1e-9
    count = len(step.lengths)
    expected = first[1][:count]
    error = float((step.output[0, :count] - expected).abs().max() / expected.abs().max())
    of_rate = f"{reached / rate:6.1%} of what is read at most"
    return f"{name:<16}{kernel:<14}{seconds * 1e6:10,.1f} us {reached:8,.0f} GB/s {of_rate}  differs from {first[0]} by {error:.1e}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rank", type=int, default=512)
    parser.add_argument("--rotated", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--backends", help="comma-separated; default: all with kernels for latents")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
    if device.type != "cuda" and not args.smoke:
        parser.error("there is no GPU; --smoke runs tiny batches on a CPU")
    dtype: torch.dtype = getattr(torch, args.dtype) if device.type == "cuda" else torch.float32
    spec = spec_of(args.heads, args.rank, args.rotated)
    rate = ceilings(device, args.smoke)["read"]
    print(f"{args.heads} heads over rows of {args.rank} + {args.rotated}; memory is read at {rate:,.0f} GB/s")
    required = Requirements.of([spec], dtype, dtype, args.page_size, device)
    names = able(args.backends.split(",") if args.backends else for_latents(device), required)
    for batch, lengths in batches(args.smoke).items():
        step, first = Step(spec, lengths, args.page_size, dtype, device), None
        for name in names:
            step.output.fill_(float("nan"))
            try:
                seconds = step.seconds(step.layer_of(backend_class(name)()))
            except (ImportError, UnsupportedError) as error:
                print(f"{batch:<16}{name:<14} {error}", flush=True)
                continue
            first = first or (name, step.output[0].clone())
            print(line(batch, name, step, seconds, rate, first), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
