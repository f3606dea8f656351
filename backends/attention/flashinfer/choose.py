"""Which of FlashInfer's kernels runs a part of a step. Pure: depends only on host numbers.

FlashInfer has three. "decode" runs on CUDA cores, one query per request. "fa2" runs on tensor cores, packs the query heads of a KV head
into one tile and splits long prefixes over the GPU. "fa3" is for SM90: fastest on long prompts, but it neither packs heads nor splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.backends.attention.flashinfer.kinds import Kind

PrefillKernel = Literal["fa2", "fa3"]
PrefillChoice = Literal["auto", "fa2", "fa3"]
DECODE_GROUPS = frozenset({1, 2, 3, 4, 8})  # the CUDA-core kernel has no other ("Unsupported group_size: 7", flashinfer#996)
TENSOR_CORE_GROUP = 4  # query heads per KV head from which tensor cores are faster
FA3_TILE = {64: 192}  # queries per tile by head dim; 128 otherwise
FA2_BLOCKS_PER_SM = 2
CASCADE_REQUESTS, CASCADE_TOKENS = 16, 1024
MERGE_THREADS = 1024
LATENT_TILE = 64  # rows of queries per program; a pair of programs, with twice as many, is used above 64 rows per request
LATENT_ITEMS = 16384  # most work items in one plan; FlashInfer does not check this


def uses_tensor_cores(kind: Kind) -> bool:
    """Whether decode runs on "fa2": for large groups, groups that the CUDA-core kernel lacks, and windows, which it does not stop at."""
    return kind.group_size >= TENSOR_CORE_GROUP or kind.group_size not in DECODE_GROUPS or kind.window_left >= 0


def prefill_kernel(
    kind: Kind, query_lens: Sequence[int], architecture: int | None, num_sms: int, wanted: PrefillChoice = "auto"
) -> PrefillKernel:
    """The kernel for extending requests: the wanted one, or for "auto" "fa3" on SM90 if its tiles fill the GPU, else "fa2".

    Raises:
        UnsupportedError: bidirectional attention with a window, which "fa2" computes wrongly (flashinfer#4972), where "fa3" is unavailable.
    """
    if not kind.causal and kind.window_left >= 0 and wanted != "fa3":
        if architecture != 90 or wanted == "fa2":
            gpu = "no CUDA device" if architecture is None else f"SM{architecture}"
            raise UnsupportedError(
                f"flashinfer runs bidirectional layers with a window only through 'fa3' on SM90; got prefill={wanted!r} on {gpu}: "
                "take another backend"
            )
        return "fa3"
    if wanted != "auto":
        return wanted
    if architecture != 90:
        return "fa2"
    tile = FA3_TILE.get(kind.head_dim, 128)
    tiles = kind.num_q_heads * sum(-(-length // tile) for length in query_lens)
    return "fa3" if tiles >= num_sms else "fa2"


def cascade_pays(kind: Kind, num_requests: int, shared_tokens: int) -> bool:
    """Whether attending to a shared prefix once for all requests, and merging, is worth three launches instead of one.

    Also False where it would be wrong: every query must see the whole prefix (no window), and a sink would count twice.
    """
    fits = kind.num_q_heads * max(1, kind.head_dim // max(8, kind.head_dim // 32)) <= MERGE_THREADS  # one thread block merges a row
    plain = kind.window_left < 0 and not kind.has_sinks
    return plain and fits and num_requests >= CASCADE_REQUESTS and shared_tokens >= CASCADE_TOKENS


def latent_items(kind: Kind, query_lens: Sequence[int], num_sms: int) -> int:
    """The most work items in a plan for latents: tiles of queries, plus one for each place where a pair of programs is cut off."""
    rows = [length * kind.num_q_heads for length in query_lens]
    tile = 2 * LATENT_TILE if sum(rows) // len(rows) > LATENT_TILE else LATENT_TILE
    return sum(-(-each // tile) for each in rows) + num_sms


def workspace_bytes(kind: Kind, num_sms: int, num_rows: int = 0) -> int:
    """The most that "fa2" may need of its float workspace: a partial output and a log-sum-exp per row of each tile and split.

    `num_rows`: the row count of a captured graph, whose plan reserves memory for every row; 0 without a graph.
    """
    if kind.rank:
        return 2 * num_sms * LATENT_TILE * (2 * kind.rank + 4) + 64
    splits = FA2_BLOCKS_PER_SM * num_sms // kind.num_kv_heads
    tile = 64 if kind.head_dim >= 256 else 128
    if num_rows:
        tile = 16 if kind.group_size <= 16 else 64 if kind.group_size <= 64 else tile
        splits = max(splits, -(-num_rows * kind.group_size // tile) + num_rows - 1)
    return kind.num_q_heads * splits * tile * (kind.head_dim + 1) * 4 + 64
