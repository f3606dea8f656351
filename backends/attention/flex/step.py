"""The layout of a step's queries and keys for flex_attention: computed once per step on the device from lengths that the host knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.kv.layer_groups import Retention
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.flex.mods import KEY_BLOCK, Where

SMALL_TILE, LARGE_TILE = 16, 128  # the smallest for tensor cores, for decode and verification; the kernel's own
AT_LEAST = 2  # tiles, and blocks per tile: torch.compile would specialize a size of 1


@dataclass
class Tiles:
    """Queries in tiles of `size`, each of one request, with empty tiles at the end if there are too few.

    By tile: request, position of the first query, number of queries. By query [tiles * size]: request (-1 for padding), position, row in
    the batch (padding repeats the tile's last). back [num_tokens]: index among the queries of each row of the batch. All int32.
    """

    size: int
    request: Tensor
    first: Tensor
    queries: Tensor
    query_request: Tensor
    query_position: Tensor
    query_row: Tensor
    back: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Tiles:
        size = SMALL_TILE if max(batch.query_lens_host) <= SMALL_TILE else LARGE_TILE
        count = sum(-(-new // size) for new in batch.query_lens_host)
        padding = max(0, AT_LEAST - count)
        new, starts = batch.query_lens, batch.query_start
        tiles = (new + size - 1) // size
        tile_starts = _before(tiles)
        request = torch.nn.functional.pad(_repeated(tiles, count), (0, padding))
        done = (_arange(count + padding, new) - tile_starts[request]) * size  # queries of the request in earlier tiles
        first, queries = (batch.seq_lens - new)[request] + done, torch.clamp(new[request] - done, 0, size)
        if padding:
            queries[count:] = 0
        offset = _arange(size, new)
        real = offset < queries[:, None]
        row = (starts[request] + done)[:, None] + torch.minimum(offset, torch.clamp(queries[:, None] - 1, min=0))
        row_request = _repeated(new, batch.num_tokens)
        back = tile_starts[row_request] * size + _arange(batch.num_tokens, new) - starts[row_request]
        return cls(
            size, request, first, queries,
            query_request=torch.where(real, request[:, None], -1).flatten(),
            query_position=(first[:, None] + offset).flatten(),
            query_row=torch.clamp(row, max=batch.num_tokens - 1).flatten(),
            back=back,
        )  # fmt: skip


@dataclass
class Keys:
    """The keys that a step's queries may see, for one kind of mask: page and offset [N] of each, and their `Where`."""

    pages: Tensor
    offsets: Tensor
    where: Where

    @classmethod
    def of(cls, batch: Batch, tiles: Tiles, spec: AttentionSpec) -> Keys:
        lengths = zip(batch.seq_lens_host, batch.query_lens_host, strict=True)
        kept = Retention(spec.sliding_window, spec.chunk)
        host_blocks = [-(-(length - kept.first(length - new)) // KEY_BLOCK) for length, new in lengths]
        count, most = sum(host_blocks), max(AT_LEAST, *host_blocks)
        lens = batch.seq_lens
        begin = kept.first(lens - batch.query_lens)
        blocks = (lens - begin + KEY_BLOCK - 1) // KEY_BLOCK
        block_starts = _before(blocks)
        owner = _repeated(blocks, count).repeat_interleave(KEY_BLOCK)
        position = begin[owner] + _arange(count * KEY_BLOCK, lens) - block_starts[owner] * KEY_BLOCK
        inside = torch.minimum(position, lens[owner] - 1)  # padding repeats the last key, so no unused slot is read

        request, first = tiles.request, tiles.first
        last = first + tiles.queries - 1
        end = last + 1
        if not spec.causal:
            end = lens[request] if spec.chunk is None else torch.minimum(lens[request], (last // spec.chunk + 1) * spec.chunk)
        low = (kept.first(first) - begin[request]) // KEY_BLOCK
        counts = torch.where(tiles.queries > 0, (end - begin[request] + KEY_BLOCK - 1) // KEY_BLOCK - low, 0)
        listed = torch.clamp((block_starts[request] + low)[:, None] + _arange(most, lens), 0, count - 1)
        where = Where(
            tiles.query_request, tiles.query_position, torch.where(position == inside, owner, -2), position,
            counts[None, None], listed[None, None].contiguous(),
        )  # fmt: skip
        return cls(batch.page_table[owner, inside // batch.page_size], inside % batch.page_size, where)


def _arange(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=like.device)


def _before(counts: Tensor) -> Tensor:
    """The exclusive prefix sum."""
    return torch.cumsum(counts, 0, dtype=torch.int32) - counts


def _repeated(counts: Tensor, total: int) -> Tensor:
    """[0] * counts[0] + [1] * counts[1] + ...; the host knows the total, so nothing waits for the device."""
    return torch.repeat_interleave(_arange(counts.shape[0], counts), counts, output_size=total)
