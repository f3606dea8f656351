"""Random ragged problems for attention backends, with everything that must not be read poisoned with NaN.

`make(...)` lays requests out in pages, fills the pool's cached slots and nothing else, and keeps each request's keys and values
as dense tensors besides. `case.to("cuda")` is the same case there. `run(...)` sends the step through the op, in a forward context.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionBackend

NAN = float("nan")
LAYER = 1  # the layer under test; layers 0 and 2 lie around it in every page
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
LAYOUTS = ("shuffled", "interleaved", "descending", "shared")
STRIDES = ("contiguous", "transposed", "sliced", "every_second")

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window_1": {"sliding_window": 1},
    "chunk": {"chunk": 6},
    "window_chunk": {"sliding_window": 4, "chunk": 7},
    "softcap": {"softcap": 1.5},
    "sinks": {"has_sinks": True},
    "bias_by_distance": {"bias_index": "distance"},
    "bias_by_key": {"bias_index": "key"},
    "windowed_bias": {"bias_index": "distance", "sliding_window": 5, "softcap": 1.5, "has_sinks": True},
    "alibi": {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
    "bidirectional": {"causal": False},
    "bidirectional_window": {"causal": False, "sliding_window": 5},
    "bidirectional_chunk": {"causal": False, "chunk": 6},
    "unequal_dims": {"v_head_dim": 4},
    "wider_v": {"v_head_dim": 12},
    "mha": {"num_kv_heads": 4},
    "gqa_7": {"num_q_heads": 7, "num_kv_heads": 1},
    "gqa_7_sinks": {"num_q_heads": 14, "num_kv_heads": 2, "has_sinks": True},
    "all": {
        "sliding_window": 9, "chunk": 12, "softcap": 1.5, "has_sinks": True, "alibi_slopes": (0.5, 0.25, 0.125, 0.0625), "v_head_dim": 4,
    },
}  # fmt: skip


def spec_of(feature: str = "plain", layer: int = LAYER, dim: int = 8) -> AttentionSpec:
    """`dim` is the head dim of q and k, and of v unless the feature is another one; scores are as large with any."""
    defaults = {"num_q_heads": 4, "num_kv_heads": 2, "qk_head_dim": dim, "v_head_dim": 8, "kv_layer": layer}
    fields = {**defaults, **FEATURES[feature]}
    return AttentionSpec(**{**fields, "v_head_dim": fields["v_head_dim"] * dim // 8, "scale": 0.41 * math.sqrt(8 / dim)})


@dataclass
class Case:
    """A step, its pool and, for oracles, each request's whole keys and values [length, kv_heads, dim] as float32."""

    spec: AttentionSpec
    pool: KVPool
    batch: Batch
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    bias: Tensor | None
    dense_keys: list[Tensor]
    dense_values: list[Tensor]

    def rows(self, request: int) -> slice:
        start = sum(self.batch.query_lens_host[:request])
        return slice(start, start + self.batch.query_lens_host[request])

    def to(self, device: torch.device | str) -> Case:
        """The same case on a device, strides and poison included, with a pool of its own; what oracles use stays where it is."""
        tensors = {name: value.to(device) for name, value in vars(self.batch).items() if isinstance(value, Tensor)}
        operands = {name: moved(getattr(self, name), device) for name in ("query", "key", "value", "sinks", "bias")}
        return dataclasses.replace(copy_of(self, device), batch=dataclasses.replace(self.batch, **tensors), **operands)


def moved(tensor: Tensor | None, device: torch.device | str) -> Tensor | None:
    """The tensor on a device with its strides, and with what lies between its elements."""
    if tensor is None:
        return None
    storage = tensor.new_empty(0).set_(tensor.untyped_storage())
    return storage.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def restride(tensor: Tensor, strides: str) -> Tensor:
    """The same values, laid out otherwise; what lies between them is NaN."""
    rows, heads, dim = tensor.shape
    if strides == "contiguous":
        return tensor.contiguous()
    if strides == "transposed":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if strides == "sliced":  # one of the parts of a fused qkv projection
        fused = tensor.new_full((rows, 3 + heads * dim + 5), NAN)
        view = fused[:, 3 : 3 + heads * dim].unflatten(1, (heads, dim))
    else:
        view = tensor.new_full((rows, heads, dim * 2), NAN)[..., ::2]
    return view.copy_(tensor)


def pages_for(
    counts: Sequence[int], layout: str, rng: random.Random, shared: int = 0, sharing: Sequence[int] = ()
) -> tuple[list[list[int]], int]:
    """Pages of each request, the first `shared` of those in `sharing` being the same, and how many the pool has, page 0 and some unused
    ones included."""
    total = sum(counts) + 4
    if layout == "interleaved":
        tables = [[1 + p * len(counts) + r for p in range(count)] for r, count in enumerate(counts)]
        return tables, 2 + max(counts) * len(counts)
    ids = list(range(1, total))
    if layout != "descending":  # pages are taken from the end
        rng.shuffle(ids)
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    for index in sharing:
        tables[index][:shared] = tables[sharing[0]][:shared]
    return tables, total


def padded(batch: Batch, rows: int) -> Batch:
    """The batch with that many padded rows more, as in a captured bucket."""
    pad = {name: torch.cat([getattr(batch, name), torch.zeros(rows, dtype=torch.int64)]) for name in ("input_ids", "positions", "slots")}
    return dataclasses.replace(batch, **pad)


def make(
    lengths: Sequence[tuple[int, int]],
    spec: AttentionSpec | None = None,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = "shuffled",
    strides: str = "contiguous",
    extra_rows: int = 0,
    seed: int = 0,
) -> Case:
    """`lengths` holds (cached, new) per request; with layout "shared", requests that have cached any share
    the pages that all of those have in full."""
    spec = spec or spec_of()
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    sharing = [index for index, (cached, _) in enumerate(lengths) if cached] if layout == "shared" else []
    shared = min((lengths[index][0] for index in sharing), default=0) // page_size
    tables, num_pages = pages_for([-(-(c + n) // page_size) for c, n in lengths], layout, rng, shared, sharing)
    neighbours = (
        dataclasses.replace(spec, kv_layer=0),
        dataclasses.replace(spec, kv_layer=2, num_kv_heads=1, alibi_slopes=None, bias_index=None),
    )
    pool = KVPool([neighbours[0], spec, neighbours[1]], num_pages, page_size, dtype)
    pool.storage.fill_(NAN)
    keys = [normal(c + n, spec.num_kv_heads, spec.qk_head_dim) for c, n in lengths]
    values = [normal(c + n, spec.num_kv_heads, spec.v_head_dim) for c, n in lengths]
    for index, (cached, _) in enumerate(lengths):
        if index in sharing:
            for each in (keys, values):
                each[index][: shared * page_size] = each[sharing[0]][: shared * page_size]
        for position in range(cached):
            page, offset = tables[index][position // page_size], position % page_size
            pool.key(LAYER)[page, offset] = keys[index][position]
            pool.value(LAYER)[page, offset] = values[index][position]
    requests = [BatchRequest([rng.randrange(96) for _ in range(n)], tables[i], c, 1) for i, (c, n) in enumerate(lengths)]
    batch = padded(Batch.build(requests, page_size), extra_rows)

    def rows_of(parts: list[Tensor]) -> Tensor:
        new = torch.cat([part[cached:] for part, (cached, _) in zip(parts, lengths, strict=True)])
        poison = new.new_full((batch.num_rows - batch.num_tokens, *new.shape[1:]), NAN)
        return restride(torch.cat([new, poison]), strides)

    queries = [normal(c + n, spec.num_q_heads, spec.qk_head_dim) for c, n in lengths]
    sinks = normal(spec.num_q_heads) if spec.has_sinks else None
    # Distances go past the end of the table; keys never do.
    width = 6 if spec.bias_index == "distance" else max(c + n for c, n in lengths)
    bias = normal(spec.num_q_heads, width).float() if spec.bias_index else None
    dense = [[t.float() for t in parts] for parts in (keys, values)]
    return Case(spec, pool, batch, rows_of(queries), rows_of(keys), rows_of(values), sinks, bias, dense[0], dense[1])


def new_output(case: Case, strides: str = "contiguous") -> Tensor:
    return restride(case.query.new_full((case.batch.num_rows, case.spec.num_q_heads, case.spec.v_head_dim), NAN), strides)


def run(
    case: Case, backend: AttentionBackend, *, save: bool = True, lse: bool = False, layer: int = LAYER, output: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output, NaN before the call unless it is given, and the log-sum-exp if asked for."""
    output = new_output(case) if output is None else output
    lse_out = output.new_full(output.shape[:2], NAN, dtype=torch.float32) if lse else None
    with ForwardContext(case.batch, case.pool, backend):
        UNIFIED_ATTENTION(case.query, case.key, case.value, output, layer, save, sinks=case.sinks, bias=case.bias, lse_out=lse_out)
    return output, lse_out


def copy_of(case: Case, device: torch.device | str | None = None) -> Case:
    """The same case with a pool of its own."""
    pool = KVPool(case.pool.layers, case.pool.num_pages, case.pool.page_size, case.pool.dtype, device or case.pool.device)
    pool.storage.copy_(case.pool.storage)
    return dataclasses.replace(case, pool=pool)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.float().cpu(), expected.float().cpu(), atol=tolerance, rtol=tolerance)
