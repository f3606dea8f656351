"""The inputs of a timed problem: several layers of one pool, together larger than the cache."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.base import AttentionCall
from paged_attn.backends.timing.problem import TimedProblem

CACHE_MULTIPLE = 4  # total KV of all input sets, as a multiple of the L2 cache
MOST_BYTES = 20e9
MOST_SETS = {"cuda": 256, "cpu": 3}
SPARE_PAGES = 8


@dataclass
class Inputs:
    """A problem on a device: `num_sets` layers of one pool, all with the same batch, each with its own query and output.

    query [sets, T, q_heads, qk_dim]; key and value [sets, T, kv_heads, dim], those of the new tokens; output [sets, T, q_heads, v_dim].
    Pages are taken in random order; page 0 and the spare ones hold NaN. There are no padding rows, so the time is that of attention.
    """

    problem: TimedProblem
    batch: Batch
    pool: KVPool
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    sinks: Tensor | None

    @classmethod
    def make(cls, problem: TimedProblem, device: torch.device | str, seed: int = 0) -> Inputs:
        device, rng = torch.device(device), random.Random(seed)
        spec, rows = problem.spec, problem.num_tokens
        row_bytes = (spec.num_q_heads + spec.num_kv_heads) * (spec.qk_head_dim + spec.v_head_dim) * problem.dtype.itemsize
        sets = num_sets(problem.kv_bytes, problem.kv_bytes + rows * row_bytes, device)
        shared = problem.shared // problem.page_size
        counts = [-(-(cached + new) // problem.page_size) - shared for cached, new in problem.requests]
        num_pages = 1 + shared + sum(counts) + SPARE_PAGES
        pages = list(range(1, num_pages))
        rng.shuffle(pages)
        first = [pages.pop() for _ in range(shared)]
        requests = [BatchRequest(range(new), first + [pages.pop() for _ in range(count)], cached)
                    for (cached, new), count in zip(problem.requests, counts, strict=True)]  # fmt: skip
        batch = Batch.build(requests, problem.page_size, device)
        real = {name: getattr(batch, name)[:rows] for name in ("input_ids", "positions", "slots")}
        batch = dataclasses.replace(batch, **real)
        layers = [dataclasses.replace(spec, kv_layer=layer) for layer in range(sets)]
        pool = KVPool(layers, num_pages, problem.page_size, problem.dtype, device)
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=problem.dtype, device=device).normal_(generator=generator)

        pool.storage.normal_(generator=generator)
        pool.storage.view(pool.num_pages, -1)[torch.tensor([0, *pages], device=device)] = float("nan")
        query = normal(sets, rows, spec.num_q_heads, spec.qk_head_dim)
        key, value = (normal(sets, rows, spec.num_kv_heads, dim) for dim in (spec.qk_head_dim, spec.v_head_dim))
        output = torch.full((sets, rows, spec.num_q_heads, spec.v_head_dim), float("nan"), dtype=problem.dtype, device=device)
        return cls(problem, batch, pool, query, key, value, output, normal(spec.num_q_heads) if spec.has_sinks else None)

    @property
    def num_sets(self) -> int:
        return len(self.pool.layers)

    @property
    def device(self) -> torch.device:
        return self.pool.device

    def call(self, layer: int) -> AttentionCall:
        query, key, value, output = (operand[layer] for operand in (self.query, self.key, self.value, self.output))
        return AttentionCall(layer, self.pool.layers[layer], query, key, value, output, self.sinks, None)

    def store_new(self) -> None:
        """Stores K and V of the new tokens in the pool."""
        for pooled, new in self._pooled():
            pooled[self._new] = new

    def poison_new(self) -> None:
        """Overwrites K and V of the new tokens in the pool with NaN."""
        for pooled, _ in self._pooled():
            pooled[self._new] = float("nan")

    def num_wrong(self) -> int:
        """Number of rows of K and V of new tokens, over all layers, that differ in the pool from what was given."""
        wrong = [(pooled[self._new] != new).flatten(1).any(1).sum() for pooled, new in self._pooled()]
        return int(torch.stack(wrong).sum())

    @cached_property
    def _new(self) -> tuple[Tensor, Tensor]:
        """Pages and offsets of the new tokens."""
        return self.batch.slots // self.batch.page_size, self.batch.slots % self.batch.page_size

    def _pooled(self) -> list[tuple[Tensor, Tensor]]:
        layers = range(self.num_sets)
        return [(self.pool.key(i), self.key[i]) for i in layers] + [(self.pool.value(i), self.value[i]) for i in layers]


def num_sets(kv_bytes: int, set_bytes: int, device: torch.device) -> int:
    """How many layers to rotate through."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 32 << 20
    wanted = max(2, math.ceil(CACHE_MULTIPLE * cache / kv_bytes))
    return max(1, min(wanted, MOST_SETS[device.type], int(MOST_BYTES // set_bytes)))
