"""How the work of one kind of layer in one step is divided: sizes and buffers on the host, one or two small launches on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.triton.deal_kernel import deal_decodes
from paged_attn.backends.attention.triton.plan_kernels import WORK_COLUMNS, count_units, deal_work
from paged_attn.backends.attention.triton.tiling import RowsKind, Tiling
from paged_attn.backends.attention.triton.together.plan_kernels import count_together
from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.machine import machine_of, power_of_2

_count, _count_shared, _deal = FastKernel(count_units), FastKernel(count_together), FastKernel(deal_work)
_deal_decodes = FastKernel(deal_decodes)
NO_WINDOW = 1 << 30  # longer than any request


@dataclass(frozen=True)
class PartitionKind:
    """What a partition depends on besides the batch: layers with equal kinds share one partition."""

    rows: RowsKind
    kv_heads: int
    group: int
    causal: bool
    window: int | None
    chunk: int | None
    chunks: str
    tiling: Tiling
    _hash: int = field(default=0, compare=False, repr=False)

    def __hash__(self) -> int:
        return self._hash

    def __post_init__(self) -> None:  # hashed once, since every layer of every step uses its kind as a key
        values = (self.rows, self.kv_heads, self.group, self.causal, self.window, self.chunk, self.chunks, self.tiling)
        object.__setattr__(self, "_hash", hash(values))

    @classmethod
    @cache
    def of(cls, spec: AttentionSpec, rows: RowsKind, tiling: Tiling) -> PartitionKind:
        chunks = "none" if spec.chunk is None else spec.chunk_part
        return cls(rows, spec.num_kv_heads, spec.group_size, spec.causal, spec.sliding_window, spec.chunk, chunks, tiling)

    @property
    def align(self) -> int:
        """A tile's keys start at a multiple of this; 0: at the first key that its first query sees.

        With rows "all" it is a whole part, so a row's sums are cut at the same keys in every tile.
        """
        block, parts = self.tiling.block_n, self.tiling.part_blocks
        return {"one": 0, "together": 0, "more": block, "all": block * parts}[self.rows]

    @property
    def one_tile(self) -> bool:
        """Whether each request has one tile, so that `deal_decodes` divides the work."""
        return self.rows == "one" and self.group <= self.tiling.block_m and not self.tiling.part_blocks

    @property
    def members(self) -> int:
        """Requests of a tile with rows "together"."""
        return self.tiling.block_m // self.group


@dataclass
class WorkPartition:
    """The partitioned work of the first R requests of a batch; those of rows "together" decode.

    work [programs + 1, WORK_COLUMNS], counters [2 * programs], units [R], tile_ends [most_items]; with rows "together" ends [R * segments];
    int32 on the batch's device.
    """

    kind: PartitionKind
    requests: int
    programs: int
    most_items: int
    search_steps: int
    units: Tensor
    tile_ends: Tensor
    work: Tensor
    counters: Tensor
    ends: Tensor
    constants: dict[str, object] = field(default_factory=dict)

    @classmethod
    def allocate(cls, kind: PartitionKind, batch: Batch, multiprocessors: int, requests: int) -> WorkPartition:
        tiling = kind.tiling
        most_tiles = _ceil(max(batch.query_lens_host) * kind.group, tiling.block_m)
        programs = (
            num_parts(kind, batch.seq_lens_host, batch.query_lens_host)
            if tiling.part_blocks
            else multiprocessors * tiling.programs_per_sm * tiling.waves
        )
        tiles = batch.num_tokens * kind.group // tiling.block_m + requests + 1
        bounds = requests * segments(kind) if kind.rows == "together" else 0
        sizes = [_ceil(n, 4) * 4 for n in (requests, tiles, (programs + 1) * WORK_COLUMNS, 2 * programs, bounds)]  # each 16-byte aligned
        memory = torch.empty(sum(sizes), dtype=torch.int32, device=batch.slots.device)
        units, tile_ends, work, counters, ends = memory.split_with_sizes(sizes)
        constants: dict[str, object] = {
            "GROUP": kind.group, "CAUSAL": kind.causal, "HAS_WINDOW": kind.window is not None, "CHUNKS": kind.chunks,
            "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "ALIGN": kind.align, "PART_BLOCKS": tiling.part_blocks,
            "ITEM_COST": tiling.item_cost,
        }  # fmt: skip
        return cls(
            kind, requests, programs, tiles * kind.kv_heads, most_tiles.bit_length(), units, tile_ends, work, counters, ends, constants
        )

    def _deal_tiles(self, batch: Batch) -> None:
        """Counts blocks, then deals them."""
        kind, requests, device = self.kind, self.requests, device_index(batch.slots.device)
        window, chunk = kind.window or 0, kind.chunk or 0
        if kind.rows == "together":
            _count_shared(
                (kind, batch.page_size), (_ceil(requests, kind.members), 1),
                (batch.page_table, batch.seq_lens, self.units, self.tile_ends, self.ends, requests, batch.page_table.stride(0)),
                {"GROUP": kind.group, "MEMBERS": kind.members, "SEGMENTS": segments(kind), "PAGE_SIZE": batch.page_size,
                 "BLOCK_M": kind.tiling.block_m, "BLOCK_N": kind.tiling.block_n, "ITEM_COST": kind.tiling.item_cost, "COLUMNS": 64},
                {"num_warps": 4}, device,
            )  # fmt: skip
        else:
            _count(
                kind, (requests, 1), (batch.seq_lens, batch.query_start, self.units, self.tile_ends, window, chunk),
                self.constants | {"ROWS": kind.rows, "BLOCK_T": 64}, {"num_warps": 1}, device,
            )  # fmt: skip
        block_r = 16 if requests <= 16 else 256  # only two kernels to compile
        _deal(
            (kind, block_r), (_ceil(self.programs + 1, 16), 1),
            (batch.seq_lens, batch.query_start, self.units, self.tile_ends, self.work, self.counters, requests, self.programs, window,
             chunk, self.search_steps),
            self.constants | {"KV_HEADS": kind.kv_heads, "BLOCK_P": 16, "BLOCK_R": block_r},
            {"num_warps": 4}, device,
        )  # fmt: skip

    def _for_decodes(self) -> tuple[Tensor | int, ...]:
        """What `deal_decodes` wants to know of a kind."""
        kind, tiling = self.kind, self.kind.tiling
        window = NO_WINDOW if kind.window is None else kind.window
        return self.work, self.counters, self.programs, window, kind.chunk or 0, tiling.block_n, tiling.item_cost, kind.kv_heads


def deal(partitions: Sequence[WorkPartition], batches: Sequence[Batch], model_follows: bool = False) -> None:
    """Launches the planning kernels of a step: one for every two kinds of layers with one tile a request, two for every other kind.

    Args:
        batches: of each partition: the step as its group of layers sees it.
        model_follows: other kernels are launched before the first attention.
    """
    pairs: list[list[WorkPartition]] = []
    for partition, batch in zip(partitions, batches, strict=True):
        if not partition.kind.one_tile:
            partition._deal_tiles(batch)
        elif pairs and len(pairs[-1]) == 1 and pairs[-1][0].kind.chunks == partition.kind.chunks:
            pairs[-1].append(partition)
        else:
            pairs.append([partition])
    for pair in pairs:
        _deal_pair(pair, batches[0])
    if not model_follows and any(each.kind.tiling.early and each.kind.tiling.first_block_early for each in partitions):
        # Such a kernel reads `work` before it waits for what was launched last, which therefore must not be a kernel above.
        partitions[0].counters.zero_()


def _deal_pair(pair: Sequence[WorkPartition], batch: Batch) -> None:
    first, last, device = pair[0], pair[-1], batch.slots.device
    requests, programs = first.requests, max(each.programs for each in pair)
    block_r = 16 if requests <= 16 else 256  # only two kernels to compile
    early = machine_of(device).early
    _deal_decodes(
        (first.kind.chunks, block_r, early), (_ceil(programs + 1, 16), len(pair)),
        (batch.seq_lens, batch.query_start, requests, *first._for_decodes(), *last._for_decodes()),
        {"CHUNKS": first.kind.chunks, "BLOCK_P": 16, "BLOCK_R": block_r, "EARLY": early},
        {"num_warps": 1 if block_r == 16 else 4, "launch_pdl": early}, device_index(device),
    )  # fmt: skip


def num_parts(kind: PartitionKind, seq_lens: Sequence[int], query_lens: Sequence[int]) -> int:
    """How many parts a fixed cut makes, from the host's lengths; at least as many as the device will find."""
    tiling, parts = kind.tiling, 0
    for length, new in zip(seq_lens, query_lens, strict=True):
        seen = length if kind.window is None else min(length, kind.window + new)
        # One more part if the first key is not on the grid.
        parts += _ceil(new * kind.group, tiling.block_m) * (_ceil(seen, tiling.block_n * tiling.part_blocks) + 1)
    return max(1, parts * kind.kv_heads)


def kept_rows(kind: PartitionKind) -> int:
    """Rows of a tile for which partial results are kept: a decode tile with few heads is mostly padding."""
    return min(kind.tiling.block_m, power_of_2(kind.group)) if kind.rows == "one" else kind.tiling.block_m


def partial_rows(kind: PartitionKind, programs: int) -> int:
    """Rows of the workspace: those of each program's first and last item."""
    return 2 * programs * kept_rows(kind)


def segments(kind: PartitionKind) -> int:
    """Columns of `ends`: blocks shared by an item's requests, each one's own, the number of requests, padded to a power of two."""
    return power_of_2(kind.members + 2)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
