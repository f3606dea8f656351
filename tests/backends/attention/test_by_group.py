"""Layers in groups: each attends over its own page table, in which what no query sees any more is page 0, and full of NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, RequestColumns
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.kv.layer_groups import group_layers
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.by_group import by_group, without_groups
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.selection.registry import backend_class
from tests.backends.problems import close

SIZE = 4
DECODE, MIXED = ((13, 1), (31, 1), (5, 1), (1, 1)), ((13, 1), (22, 9), (0, 7), (0, 1), (40, 1))
LIMITS: tuple[dict[str, Any], ...] = ({}, {"sliding_window": 6}, {"chunk": 8}, {"sliding_window": 6})
LAYERS = [AttentionSpec(4, 2, 16, 16, 0.3, kv_layer=index, **limit) for index, limit in enumerate(LIMITS)]


def stepped(backend: Any, pool: KVPool, batch: Batch, inputs: list[list[Tensor]]) -> list[Tensor]:
    outputs = []
    with ForwardContext(batch, pool, backend):
        for layer, (query, key, value) in enumerate(inputs):
            outputs.append(torch.full_like(query, float("nan")))
            UNIFIED_ATTENTION(query, key, value, outputs[-1], layer, True)
    return outputs


@pytest.mark.parametrize("lengths", [DECODE, MIXED])
@pytest.mark.parametrize(
    ("name", "deterministic"), [("triton", False), ("triton", True), ("torch_native", False), ("reference", False), ("flex", False)]
)
def test_a_group_reads_its_own_table_and_nothing_that_was_given_back(
    name: str, deterministic: bool, lengths: tuple[tuple[int, int], ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    counts = [-(-(cached + new) // SIZE) for cached, new in lengths]
    starts = np.cumsum([1, *counts])
    requests = [
        BatchRequest([1] * new, list(range(start, start + count)), cached)
        for (cached, new), start, count in zip(lengths, starts.tolist(), counts, strict=False)
    ]
    whole = KVPool(LAYERS, sum(counts) + 1, SIZE, torch.float32)
    whole.storage.copy_(torch.randn(whole.storage.shape, generator=generator))
    groups = group_layers(LAYERS, 1000, SIZE)
    assert len(groups) == 4
    pool = KVPool(LAYERS, 4 * sum(counts) + 1, SIZE, torch.float32, groups=groups)
    pool.storage.fill_(float("nan"))
    columns = RequestColumns.of(requests)
    table = columns.page_table
    order = torch.randperm(4 * sum(counts), generator=generator).reshape(4, -1).numpy() + 1
    tables = np.stack([np.where(table > 0, of_group[table - 1], 0) for of_group in order]).astype(np.int32)
    for group, of_group in zip(groups, tables, strict=True):
        of_group[np.arange(table.shape[1]) < group.keeps.first(columns.num_cached)[:, None] // SIZE] = 0
        for layer in group.layers:
            for row, (cached, _) in enumerate(lengths):
                for position in range(group.keeps.first(cached) // SIZE * SIZE, cached):
                    at, source = (of_group[row, position // SIZE], position % SIZE), (table[row, position // SIZE], position % SIZE)
                    pool.key(layer)[at], pool.value(layer)[at] = whole.key(layer)[source], whole.value(layer)[source]
    grouped = RequestColumns.of(requests)
    grouped.page_table, grouped.group_tables = tables[0], tables[1:]
    rows = max(2, sum(new for _, new in lengths))
    inputs = [[torch.randn(rows, heads, 16, generator=generator) for heads in (4, 2, 2)] for _ in LAYERS]
    expected = stepped(ReferenceBackend(), whole, Batch.build(requests, SIZE), inputs)
    backend = by_group(backend_class(name)(deterministic=deterministic), pool)
    for actual, wanted in zip(stepped(backend, pool, Batch.build(grouped, SIZE), inputs), expected, strict=True):
        close(actual, wanted)


def test_a_batch_with_one_table_is_refused() -> None:
    pool = KVPool(LAYERS, 9, SIZE, torch.float32, groups=group_layers(LAYERS, 1000, SIZE))
    backend, batch = by_group(ReferenceBackend(), pool), Batch.build([BatchRequest([1, 2], [1])], SIZE)
    with pytest.raises(ContextError, match="the pool has 4 groups of layers, and the batch page tables of 1; build it of RequestColumns"):
        ForwardContext(batch, pool, backend).__enter__()
    small, inner = without_groups(pool, backend, 2)
    assert isinstance(inner, ReferenceBackend) and small.parts == ()
    with ForwardContext(batch, small, inner):
        pass
