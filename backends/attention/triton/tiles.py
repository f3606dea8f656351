"""Query tiles and the keys that they see: the geometry that the planner and the attention kernel share.

A request's queries are flattened over (token, head in the KV head's group): row i of tile t is flat row t * BLOCK_M + i, token
flat // GROUP, head flat % GROUP. So a decode step is one tile of GROUP rows, and a short extension fills a tile with all its heads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_keys(tile, query_len, seq_len, window, chunk,
              GROUP: tl.constexpr, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKS: tl.constexpr,
              BLOCK_M: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """Positions of the tile's first and last query, and the keys [low, high) that any of them sees, possibly none.

    CHUNKS: "none", or the chunks that a query sees (`AttentionSpec.chunk_part`). If ALIGN is not 0, low is rounded down to a
    multiple of it.
    """
    cached = seq_len - query_len
    first = cached + (tile * BLOCK_M) // GROUP
    last = cached + tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, query_len - 1)
    low = first * 0
    if HAS_WINDOW:
        low = tl.maximum(low, first - window + 1)
    if CHUNKS == "intra":
        low = tl.maximum(low, first // chunk * chunk)
    if CHUNKS == "successive":
        low = tl.maximum(low, (first // chunk - 1) * chunk)
    if ALIGN > 0:
        low = low // ALIGN * ALIGN
    if CHUNKS == "successive":
        high = last // chunk * chunk
    elif CHUNKS == "inter":
        high = tl.maximum(last // chunk - 1, 0) * chunk
    elif CAUSAL:
        high = last + 1
    elif CHUNKS == "intra":
        high = tl.minimum(seq_len, (last // chunk + 1) * chunk)
    else:
        high = seq_len + last * 0
    return first, last, low, high


@triton.jit
def is_chosen(query_len, ROWS: tl.constexpr):
    """Whether a launch serves a request: ROWS is "all", "one" (requests with one new token) or "more"."""
    if ROWS == "one":
        return query_len == 1
    elif ROWS == "more":
        return query_len > 1
    else:
        return query_len > 0


@triton.jit
def first_item(share):
    """From a program's row of `work` (see plan_kernels): request, tile, KV head, first block, block count, and the request's lengths."""
    return (tl.load(share), tl.load(share + 1), tl.load(share + 2), tl.load(share + 3), tl.load(share + 4), tl.load(share + 8),
            tl.load(share + 9), tl.load(share + 10))  # fmt: skip


@triton.jit
def next_item(request, tile, kv_head, start, query_len, seq_len, left, query_start, seq_lens,
              KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """The next item: the next tile, KV head or chosen request. After the last one `left` is at most 0, and nothing is read."""
    tile += 1
    if tile * BLOCK_M >= query_len * GROUP:
        tile = 0
        kv_head += 1
        if kv_head == KV_HEADS:
            kv_head = 0
            request += 1
            if left > 0:
                start = tl.load(query_start + request)
                end = tl.load(query_start + request + 1)
                while not is_chosen(end - start, ROWS):
                    request += 1
                    start = end
                    end = tl.load(query_start + request + 1)
                query_len = end - start
                seq_len = tl.load(seq_lens + request)
    return request, tile, kv_head, start, query_len, seq_len
