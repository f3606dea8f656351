"""Launch parameters of the kernels: `tiling` chooses them for a step. What follows are the measurements behind its numbers.

Measured on one H200 (triton 3.6.0, torch 2.11, 2026-11-21) with `python benchmarks/kernels.py`, 32 query heads over 8, dim 128, bfloat16:
- Decode: 64 keys, 4 warps, 3 stages, 2 programs per multiprocessor were best or within 1 % of it on six of seven shapes. One request of
  4,096 tokens gains 8 % from one program per multiprocessor, which halves the parts to merge, and from an early launch, which is slower on
  all other shapes. Counting an item as 3 blocks more made ragged batches (64 to 16,384 tokens) 1.17 to 1.37 times as fast.
- What attention adds to a chain of products that are launched early, as in a model (`benchmarks/decode_chain.py`, H200, 2026-11-30, us;
  Llama 3.1 8B, one request of 300, 600, 1,200 tokens): 7.1, 7.6, 12.3. Without a pipeline, for which a program with one block only waits,
  5.2, 6.1, 10.4; with 8 warps 4.9, 5.6, 10.0; with the first block requested before the previous kernel has ended 3.1, 4.3, 8.8. Blocks
  of 128 keys: 4.9, 5.7, 7.4. gpt-oss (heads of 64): 5.1, 5.7, 9.3 before, 3.1, 3.9, 7.5 with blocks of 64, 3.3, 3.4, 4.7 with 128. Two and
  four requests of 600 tokens (Llama): 8.7 and 13.8 before, 9.1 and 13.8 with blocks of 64, 7.6 and 12.7 with 128 and nothing early; eight:
  13.5 before, 16.6. Two programs per multiprocessor are slower in all of these (one request of 600 tokens 5.4).
- Tiles of several requests are from one H100 (2026-11-27, `benchmarks/results/shared_prefix_h100.json`): with 32 heads over 8, 64 requests
  that share 2,048 tokens take 109 us separately, 39 with tiles of 16 rows, 38 with 32. If nothing is shared, 32 rows cost 4 to 14 % more,
  16 rows 0 to 1.5 us. Three blocks for an item are within 2 % of six, and merging two parts at once is within 2 % of four or eight.
- Extension: `attend_hopper` with 128 keys and 2 buffers runs at 1.4 to 1.6 times `attend_kernel`'s speed; 64 keys and 4 buffers are 1.18
  times as fast again on prompts of 1,024 tokens, and slower from 8,192 on.
- `attend_hopper` at other head dims than 64 and 128 has what fits into shared memory and registers. At 192 with 128 that was the fastest or
  within 1 % of it; at 256 the producer's 88 registers are 2 to 6 % faster than 72 (2026-11-25, `python benchmarks/prefill.py --tilings`).
- Waves are from one H100 (2026-11-26, `benchmarks/results/prefill_waves_h100.json`): 192 with 128, 16 KV heads, 7,808 new tokens after
  8,192 take 2,434 us in one wave, 1,854 in two, 1,745 in four; 512 after 15,488 take 155 us in one, 185 in two.

Parameters for latents are from one H100 (2026-11-26, `python benchmarks/latent_sweep.py`): 16 rows are up to 7 % faster in `attend_latent`,
with one program of 64 tokens per multiprocessor, than in `attend_latent_hopper`; 64 rows are 1.1 to 1.8 times as fast in the latter.
Counting an item as 4 blocks more makes a ragged batch of 16 rows 1.2 times as fast, and costs one request of 4,096 tokens 6 %.
On other GPUs than Hopper it is only known that the kernels compile for an A100, an L4, an RTX 5090 and a B200, and fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.machine import Machine, power_of_2

RowsKind = Literal["one", "together", "more", "all"]
FEW_ITEMS = 32  # most items of a decode step (a KV head of a request each) of which a program gets a block or two
TOGETHER = 16  # fewest requests for tiles that hold several of them
HOPPER_BYTES = 224 << 10  # shared memory for tiles: 227 KiB minus layout conversions and barriers


@dataclass(frozen=True)
class Tiling:
    """How a launch divides its work.

    Attributes:
        block_m, block_n: flattened query rows of a tile, keys of a block.
        warps, stages: of a program, and of its software pipeline.
        programs_per_sm: number of programs in the grid per multiprocessor.
        merge_parts: parts that a merge loads at once.
        part_blocks: 0, or the fixed number of blocks after which an item is cut (deterministic).
        item_cost: time of an item besides its blocks, in blocks.
        early: launch before the previous kernel has ended (programmatic dependent launch).
        first_block_early: a program reads the first keys and values of a decode step before it waits for that kernel.
        hopper: run `attend_hopper` in place of `attend_kernel`; `stages` are then its buffers for K and for V.
        query_tiles: tiles of queries in its memory; with two, the next is copied while the consumers work on the last.
        producer_registers: registers of a copying thread of `attend_hopper`; the two consumers share the rest.
        waves: grids of that size that run one after the other, so that the L2 cache holds the keys and values that each of them reads.
        turns: the two consumers issue their matrix products alternately, so that one's softmax overlaps with the other's products.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs_per_sm: int
    merge_parts: int = 8
    part_blocks: int = 0
    item_cost: int = 0
    early: bool = False
    first_block_early: bool = False
    hopper: bool = False
    query_tiles: int = 2
    producer_registers: int = 72
    waves: int = 1
    turns: bool = True


def tiling(
    rows: RowsKind, spec: AttentionSpec, dtype: torch.dtype, longest_query: int, longest_context: int, total_keys: int, machine: Machine,
    decodes: int = 1,
) -> Tiling:  # fmt: skip
    """The tiling for requests with one new token ("one"), with more, or for all alike, which makes results independent of the batch.

    `longest_query` and `longest_context`: the most new tokens, and total tokens, of a request; `total_keys`: over all requests that the
    launch serves; `decodes`: the number of requests with one new token.
    """
    found = _tiling(rows, spec, dtype, longest_query, longest_context, total_keys, machine, decodes)
    return found if found.hopper else _fitting(found, spec, dtype.itemsize, machine.shared_bytes)


def _tiling(
    rows: RowsKind, spec: AttentionSpec, dtype: torch.dtype, longest_query: int, longest_context: int, total_keys: int, machine: Machine,
    decodes: int = 1,
) -> Tiling:  # fmt: skip
    if isinstance(spec, LatentSpec):
        return _latent(rows, spec, dtype, longest_query, machine)
    dim = power_of_2(max(spec.qk_head_dim, spec.v_head_dim, 16))
    if rows == "together":
        return replace(_decode(dim, spec, dtype, total_keys, machine, decodes), merge_parts=2, early=False)
    if rows == "one":
        return _decode(dim, spec, dtype, total_keys, machine, decodes)
    if rows == "more":
        found = _extend(dim, spec, dtype, longest_query, longest_context, machine)
        waves = _waves(spec, longest_query, longest_context, total_keys, found, machine) if found.hopper else 1
        return found if waves == found.waves else replace(found, waves=waves)
    if dtype.itemsize > 2:
        return Tiling(16, 16, 4, 2, 1, 1, part_blocks=64)
    return Tiling(64, 64, 4, 3, 1, 1, part_blocks=16) if dim <= 128 else Tiling(64, 32, 4, 2, 1, 1, part_blocks=32)


def _fitting(tiles: Tiling, spec: AttentionSpec, itemsize: int, shared_bytes: int) -> Tiling:
    """Reduces buffers, then keys, then queries, until shared memory has room for what `attend_kernel` keeps there: queries, all blocks of
    keys and values but one, and the weights, which stay in registers if there are 128 rows of them. Without a pipeline it keeps a block of
    keys or of values, and of both if the first one is read early."""
    if isinstance(spec, LatentSpec):
        query = block = alone = power_of_2(max(spec.rank, 16)) + (power_of_2(spec.rotated) if spec.rotated else 0)
    else:
        query, values = (power_of_2(max(dim, 16)) for dim in (spec.qk_head_dim, spec.v_head_dim))
        block = query + values
        alone = block if tiles.first_block_early else max(query, values)
    kept = alone if tiles.stages == 1 else (tiles.stages - 1) * block
    weights = tiles.block_m * tiles.block_n if tiles.block_m < 128 else 0
    needed = itemsize * (tiles.block_m * query + tiles.block_n * kept + weights)
    least = (tiles.block_m, tiles.block_n) == (16, 16) and tiles.stages <= 2
    if not shared_bytes or needed <= shared_bytes or least:
        return tiles
    if tiles.stages > 2:
        smaller = replace(tiles, stages=tiles.stages - 1)
    elif tiles.block_n > 32 or tiles.block_m == 16:
        smaller = replace(tiles, block_n=tiles.block_n // 2, part_blocks=tiles.part_blocks * 2)
    else:
        smaller = replace(tiles, block_m=tiles.block_m // 2)
    return _fitting(smaller, spec, itemsize, shared_bytes)


def in_hopper_kernel(spec: AttentionSpec) -> bool:
    """Whether `attend_hopper` supports a layer, in 16 bits: every feature but ALiBi, biases, and chunks other than a query's own.

    Head dims are a power of two from 64 to 256, optionally plus a smaller one of 16 to 64 (80, 96, 192, ..), which is a separate tile in
    shared memory. Values are as wide as keys, or as their first tile (192 with 128), since the output uses the queries' memory.
    """
    first = power_of_2(spec.qk_head_dim + 1) // 2
    dims = first in (64, 128, 256) and spec.qk_head_dim - first in (0, 16, 32, 64) and spec.qk_head_dim <= 256
    plain = spec.alibi_slopes is None and spec.bias_index is None and spec.chunk_part == "intra"
    return plain and dims and spec.v_head_dim in (spec.qk_head_dim, first)


def in_latent_hopper(spec: LatentSpec) -> bool:
    """Whether `attend_latent_hopper` supports these rows, in 16 bits: a block's 64 weights overwrite its tokens' rotated parts."""
    return spec.rank in (256, 512) and spec.rotated == 64


def prefers_latent_hopper(rows: RowsKind, spec: LatentSpec) -> bool:
    """Whether it is used: for decode steps with a rank of 512, for which it was run and measured on a GPU."""
    return rows == "one" and spec.rank == 512


def shares_keys(spec: AttentionSpec, dtype: torch.dtype, requests: int, total_keys: int, machine: Machine) -> bool:
    """Whether decoding requests share tiles, so that shared keys are read once."""
    plain = spec.sliding_window is None and spec.chunk is None and spec.alibi_slopes is None and spec.bias_index is None and spec.causal
    if isinstance(spec, LatentSpec) or not plain or requests < TOGETHER or total_keys <= few_keys(spec, dtype, machine):
        return False
    dim = power_of_2(max(spec.qk_head_dim, spec.v_head_dim, 16))
    return _decode(dim, spec, dtype, total_keys, machine, requests).block_m >= 2 * spec.group_size


def few_keys(spec: AttentionSpec, dtype: torch.dtype, machine: Machine) -> int:
    """The most keys, over all requests, with which a decode step counts as small: up to 8 blocks per multiprocessor."""
    if dtype.itemsize > 2:
        return 0
    return 8 * _decode_block_n(spec) * machine.multiprocessors // spec.num_kv_heads


def one_block_keys(spec: AttentionSpec, machine: Machine) -> int:
    """The most keys of a single request with which each program has at most one block of 64; 0 for narrow heads, whose tiling stays."""
    return 0 if max(spec.qk_head_dim, spec.v_head_dim) <= 64 else 64 * machine.multiprocessors // spec.num_kv_heads


def _decode_block_n(spec: AttentionSpec) -> int:
    return 64 if max(spec.qk_head_dim, spec.v_head_dim) <= 128 else 32


def _decode(dim: int, spec: AttentionSpec, dtype: torch.dtype, total_keys: int, machine: Machine, decodes: int) -> Tiling:
    block_m = min(max(16, power_of_2(spec.group_size)), 64)
    if dtype.itemsize > 2:
        return Tiling(block_m, 16, 4, 2, 2, 2)
    merge_parts = 8 if block_m == 16 and dim <= 128 else 2
    items, seen = decodes * spec.num_kv_heads, total_keys
    if spec.sliding_window is not None and items <= 2 * machine.multiprocessors:  # measured with 256 of an H200's 132; more were not
        seen = min(total_keys, decodes * spec.sliding_window)
    if seen > few_keys(spec, dtype, machine):
        return Tiling(block_m, _decode_block_n(spec), 4, 3, 2, merge_parts, item_cost=3)
    if items > FEW_ITEMS:
        return Tiling(block_m, _decode_block_n(spec), 4, 3, 1, merge_parts, early=machine.early)
    first_early = decodes == 1 and (dim <= 64 or seen <= one_block_keys(spec, machine))
    keys = 64 if dim > 128 or (dim > 64 and first_early) else 128
    return Tiling(block_m, keys, 8, 1, 1, merge_parts, early=machine.early, first_block_early=first_early)


def _extend(dim: int, spec: AttentionSpec, dtype: torch.dtype, longest_query: int, longest_context: int, machine: Machine) -> Tiling:
    block_m = min(max(16, power_of_2(longest_query * spec.group_size)), 128)
    if dtype.itemsize > 2:
        return Tiling(min(block_m, 32), 32 if dim <= 64 else 16, 4, 2, 1, 1)
    if machine.hopper and block_m == 128 and in_hopper_kernel(spec):
        return _hopper(spec, longest_context)
    if block_m <= 32:
        return Tiling(block_m, 64 if dim <= 128 else 32, 4, 3, 2, 2)
    if dim > 128:
        return Tiling(min(block_m, 64), 32, 4, 2, 1, 1)
    return Tiling(block_m, 64, 4 if block_m == 64 else 8, 3, 1, 1)


def _hopper(spec: AttentionSpec, longest_context: int) -> Tiling:
    """Blocks of 128 keys, unless smaller ones waste less (few keys) or a consumer's registers hold sums over more than 128 columns; then as
    many buffers as fit into shared memory: first two for keys and values, then a second one for queries.
    """
    block_n = 64 if longest_context <= 2048 or spec.v_head_dim > 128 else 128
    queries, block = 128 * spec.qk_head_dim * 2, block_n * (spec.qk_head_dim + spec.v_head_dim) * 2
    query_tiles = 2 if 2 * queries + 2 * block <= HOPPER_BYTES else 1
    stages = min(4, (HOPPER_BYTES - query_tiles * queries) // block)
    few, many = block_n == 64 and spec.qk_head_dim <= 128, spec.v_head_dim > 128
    registers = 56 if few else 88 if many else 72  # for the addresses of 64 rows with 128 columns, with 256, or in between
    return Tiling(128, block_n, 4, stages, 1, 1, item_cost=1, hopper=True, query_tiles=query_tiles, producer_registers=registers)


def _waves(spec: AttentionSpec, longest_query: int, longest_context: int, total_keys: int, tiles: Tiling, machine: Machine) -> int:
    """About one wave for each L2 cache that all keys and values fill. The work lies end to end, one head of a request after the other, so a
    wave reads only some of them. A wave costs 10 to 30 us, the time of some 10 blocks of a program; each has 64 or more. Partial results
    of all programs are kept: up to 2,048 columns of float32 for each row of a tile and multiprocessor.

    Sliding windows have one wave, since a program's own keys are few.
    """
    if not machine.l2_bytes or (spec.sliding_window is not None and spec.sliding_window < longest_context):
        return 1
    bytes_read = total_keys * spec.num_kv_heads * (spec.qk_head_dim + spec.v_head_dim) * 2
    keys = longest_context - longest_query // 2 if spec.causal else longest_context
    requests = total_keys / max(longest_context, 1)  # if all were as long as the longest
    tiles_of_one = spec.num_kv_heads * (longest_query * spec.group_size // tiles.block_m)
    blocks = int(requests * tiles_of_one * (keys // tiles.block_n)) // machine.multiprocessors
    most = min(1024 // power_of_2(spec.v_head_dim), blocks // 64)
    return max(1, min(round(bytes_read / machine.l2_bytes), most))


def _latent(rows: RowsKind, spec: LatentSpec, dtype: torch.dtype, longest_query: int, machine: Machine) -> Tiling:
    """For `attend_latent`: sums of 64 rows over a rank of 512 take half of a multiprocessor's registers, so 8 warps share them, and 64 is
    the maximum; the other half holds scores and addresses. Shared memory holds those rows' queries (72 KiB with 64 rotated) and two blocks
    of 64 tokens, 72 KiB each. With 16 rows, which are bound by memory, two programs with two blocks of 32 tokens fit on a multiprocessor;
    blocks of 64, as on Hopper, take 164 KiB, more than some GPUs have. `attend_latent_hopper` has tiles of 64 rows. On Blackwell 64 rows
    would take 345 KiB and spill a thousand bytes of each thread's registers; 32 take 112 KiB and spill none (compiled, not run).
    """
    rank = power_of_2(max(spec.rank, 16))
    most = 32 if machine.blackwell else 64
    block_m = min(max(16, power_of_2(spec.num_q_heads * (1 if rows == "one" else longest_query))), most)
    if dtype.itemsize > 2:
        return Tiling(16, 16, 8, 2, 1, 1 if rows == "all" else 2, part_blocks=64 if rows == "all" else 0)
    if machine.hopper and in_latent_hopper(spec) and prefers_latent_hopper(rows, spec):
        if rank == 512 and block_m == 16:
            return Tiling(16, 64, 8, 3, 1, 4, item_cost=4)
        return Tiling(64, 64, 4, 2 if rank == 512 else 4, 1, 4, item_cost=2, hopper=True, producer_registers=64)
    if rows == "all":
        return Tiling(most, 64 if spec.rotated <= 64 else 32, 8, 2, 1, 1, part_blocks=16 if spec.rotated <= 64 else 32)
    if rank <= 256:
        warps, programs = (4, 2) if rank <= 128 else (8, 2 if block_m == 16 else 1)
        return Tiling(block_m, 64, warps, 3, programs, 4, item_cost=1)
    if block_m == 64:
        return Tiling(64, 64 if spec.rotated <= 64 else 32, 8, 2, 1, 4, item_cost=1)
    return Tiling(block_m, 32, 8, 3, 2 if block_m == 16 else 1, 4, item_cost=1)
