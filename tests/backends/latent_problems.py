"""Random steps of latent attention for backends, with everything that must not be read poisoned with NaN, and the model's own formula."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.latent import LATENT_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import HeadRows, LatentSpec
from paged_attn.backends.attention.base import AttentionBackend

LAYER = 1  # between two plain layers
PLAIN = AttentionSpec(2, 1, 8, 8, 1.0)
# (cached, new) of each request
STEPS = {
    "prompts": ((0, 5), (0, 1), (0, 13)),
    "decode": ((4, 1), (15, 1), (16, 1), (1, 1)),
    "mixed": ((7, 1), (0, 9), (16, 5), (3, 1), (31, 2)),
    "chunks": ((16, 16), (5, 11), (40, 7)),
}
SPECS = {"512 + 64": (32, 8, 12, 10, False), "no rotated part": (16, 0, 8, 8, False), "rotated first": (20, 4, 6, 12, True)}
# rank, rotated, key_dim and value_dim of DeepSeek V2 and V3, MiniCPM3, Mistral 4, AXK2 and GLM 5; one that is not a power of two
PUBLISHED = {
    "512 + 64": (512, 64, 128, 128, False), "256 + 32": (256, 32, 64, 64, False), "256 + 64": (256, 64, 64, 128, False),
    "128 + 32": (128, 32, 64, 64, False), "512 + 0": (512, 0, 192, 256, False), "96 + 24": (96, 24, 32, 32, True),
}  # fmt: skip


def spec_of(kind: str, heads: int = 4, sizes: dict[str, tuple[int, int, int, int, bool]] = SPECS) -> LatentSpec:
    rank, rotated, key_dim, value_dim, first = sizes[kind]
    return LatentSpec(
        heads, 1, rank + rotated, rank, (key_dim + rotated) ** -0.5 * 1.2, kv_layer=LAYER, rotated=rotated, key_dim=key_dim,
        value_dim=value_dim, rotated_first=first, keys=HeadRows(0, key_dim + value_dim), values=HeadRows(key_dim, key_dim + value_dim),
    )  # fmt: skip


@dataclass
class Case:
    """A step over a pool whose unused slots, and whose padded rows, are NaN; `expected` [tokens, heads, value_dim] in float64."""

    spec: LatentSpec
    batch: Batch
    pool: KVPool
    query: Tensor
    rows: Tensor
    weight: Tensor
    expected: Tensor

    def run(self, backend: AttentionBackend) -> Tensor:
        """[rows, heads, value_dim]"""
        shape = (self.batch.num_rows, self.spec.num_q_heads, self.spec.value_dim)
        output = torch.full(shape, float("nan"), dtype=self.query.dtype, device=self.query.device)
        rotated = self.rows[:, self.spec.rank :] if self.spec.rotated else None
        with ForwardContext(self.batch, self.pool, backend):
            LATENT_ATTENTION(self.query, self.rows[:, : self.spec.rank], rotated, self.weight, self.weight, output, LAYER)
        return output

    def assert_right(self, backend: AttentionBackend, tolerance: float = 1e-5) -> None:
        before = self.pool.storage.clone()
        output, count = self.run(backend), self.batch.num_tokens
        assert not output[count:].any(), "padding is zeroed"
        error = (output[:count].double().cpu() - self.expected).abs().max() / self.expected.abs().max()
        assert error <= tolerance
        slots = self.batch.slots[:count]
        kept = self.pool.key(LAYER)[slots // self.batch.page_size, slots % self.batch.page_size, 0]
        assert torch.equal(kept, self.rows[:count])
        self.pool.key(LAYER)[slots // self.batch.page_size, slots % self.batch.page_size] = float("nan")
        assert torch.equal(self.pool.storage.nan_to_num(7.0), before.nan_to_num(7.0)), "nothing else is written"

    def assert_right_with_maps_of_the_model(self, backend: AttentionBackend) -> None:
        """The same numbers if queries and outputs are mapped outside the op, which gets no weights."""
        spec, heads = self.spec, self.spec.num_q_heads
        assert spec.keys is not None and spec.values is not None
        plain, rotated = spec.split(self.query)
        mapped = torch.einsum("thd,hdr->thr", plain, spec.keys.of(self.weight, heads, spec.key_dim))
        query = torch.cat((rotated, mapped) if spec.rotated_first else (mapped, rotated), -1)
        own = replace(spec, keys=None, values=None, key_dim=spec.rank, value_dim=spec.rank)
        layers = [own if layer is spec else layer for layer in self.pool.layers]
        pool = KVPool(layers, self.pool.num_pages, self.pool.page_size, self.pool.dtype, self.pool.device)
        pool.storage.copy_(self.pool.storage)
        shared, output = (
            self.rows[:, spec.rank :] if spec.rotated else None,
            query.new_full((self.batch.num_rows, heads, spec.rank), float("nan")),
        )
        with ForwardContext(self.batch, pool, backend):
            LATENT_ATTENTION(query, self.rows[:, : spec.rank], shared, None, None, output, LAYER)
        count = self.batch.num_tokens
        result = torch.einsum("thr,hdr->thd", output[:count].double(), spec.values.of(self.weight, heads, spec.value_dim).double())
        assert not output[count:].any() and float((result - self.expected).abs().max() / self.expected.abs().max()) < 1e-5

    def to(self, device: torch.device | str) -> Case:
        """The same case on a device, with a pool of its own; what is expected stays where it is."""
        pool = KVPool(self.pool.layers, self.pool.num_pages, self.pool.page_size, self.pool.dtype, device)
        pool.storage.copy_(self.pool.storage)
        tensors = {f.name: value.to(device) for f in fields(self.batch) if isinstance(value := getattr(self.batch, f.name), Tensor)}
        batch = replace(self.batch, **tensors)
        moved = {name: getattr(self, name).to(device) for name in ("query", "rows", "weight")}
        return replace(self, batch=batch, pool=pool, **moved)


def make(
    kind: str | LatentSpec, lengths: tuple[tuple[int, int], ...], page_size: int, dtype: torch.dtype = torch.float32, padding: int = 3,
    beside: AttentionSpec = PLAIN,
) -> Case:  # fmt: skip
    """`beside`: the layers before and after, which share the pool."""
    spec, draw = spec_of(kind) if isinstance(kind, str) else kind, torch.Generator().manual_seed(1)
    heads, width = spec.num_q_heads, spec.key_dim + spec.value_dim
    pages = sum(-(-(cached + new) // page_size) for cached, new in lengths)
    order = (torch.randperm(pages, generator=draw) + 1).tolist()
    pool = KVPool([replace(beside, kv_layer=0), spec, replace(beside, kv_layer=2)], pages + 2, page_size, dtype)
    pool.storage.fill_(float("nan"))
    weight = (torch.randn(heads * width, spec.rank, generator=draw) * 0.4 * min(1.0, 32 / spec.rank) ** 0.5).to(dtype)
    requests, new_rows, queries, expected = [], [], [], []
    for cached, new in lengths:
        table = [order.pop() for _ in range(-(-(cached + new) // page_size))]
        requests.append(BatchRequest([1] * new, table, cached, 1))
        rows = torch.randn(cached + new, spec.qk_head_dim, generator=draw).to(dtype)
        query = torch.randn(new, heads, spec.key_dim + spec.rotated, generator=draw).to(dtype)
        for position in range(cached):
            pool.key(LAYER)[table[position // page_size], position % page_size, 0] = rows[position]
        new_rows.append(rows[cached:])
        queries.append(query)
        expected.append(dense(spec, query, rows, weight))
    batch = Batch.build(requests, page_size)
    more = torch.zeros(padding, dtype=torch.int64)
    batch = replace(batch, input_ids=torch.cat([batch.input_ids, more]), slots=torch.cat([batch.slots, more]))
    missing = batch.num_rows - batch.num_tokens
    query, rows = (torch.cat([*each, torch.full((missing, *each[0].shape[1:]), float("nan"), dtype=dtype)]) for each in (queries, new_rows))
    return Case(spec, batch, pool, query, rows, weight, torch.cat(expected))


def dense(spec: LatentSpec, query: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """The model's own formula for the last tokens of one request, in float64: [new, heads, value_dim]."""
    products = rows[:, : spec.rank].double() @ weight.double().T  # [length, heads * (key_dim + value_dim)]
    keys, values = products.unflatten(-1, (spec.num_q_heads, -1)).split([spec.key_dim, spec.value_dim], -1)
    shared = rows[:, None, spec.rank :].double().expand(-1, spec.num_q_heads, -1)
    keys = torch.cat((shared, keys) if spec.rotated_first else (keys, shared), -1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * spec.scale
    new, length = len(query), len(rows)
    hidden = torch.arange(length) > torch.arange(length - new, length)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
