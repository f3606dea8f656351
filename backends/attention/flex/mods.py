"""What a layer computes, as flex_attention's mask_mod and score_mod over one row of queries and one row of keys.

The queries of all requests lie one after another, each request's padded to whole tiles, and the keys likewise, padded to whole blocks.
`Where` says which request and position each row belongs to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from paged_attn.attn_ops.specs.attention import AttentionSpec

KEY_BLOCK = 128
logger = logging.getLogger("paged_attn")
Mod = Callable[..., Tensor]
Attend = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Formula:
    """What flex_attention is compiled for: the relevant part of a spec, the queries in a tile, and whether lse is wanted."""

    scale: float
    causal: bool
    window: int | None
    chunk: int | None
    softcap: float | None
    bias: Literal["distance", "key"] | None
    tile: int
    lse: bool

    @classmethod
    def of(cls, spec: AttentionSpec, tile: int, lse: bool) -> Formula:
        return cls(spec.scale, spec.causal, spec.sliding_window, spec.chunk, spec.softcap, spec.bias_index, tile, lse)


class Where(NamedTuple):
    """All int32. For each query [Q] and key [N]: its request (-1 and -2 for padding) and its position. For the key blocks: how many each
    tile reads [1, 1, tiles], and their indices, padded [1, 1, tiles, most]."""

    query_request: Tensor
    query_position: Tensor
    key_request: Tensor
    key_position: Tensor
    block_counts: Tensor
    blocks: Tensor


def mask_mod(formula: Formula, where: Where) -> Mod:
    query_request, query_position, key_request, key_position, _, _ = where
    window, chunk = formula.window, formula.chunk

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        i, j = query_position[q], key_position[kv]
        seen = query_request[q] == key_request[kv]
        if formula.causal:
            seen = seen & (j <= i)
        if window is not None:
            seen = seen & (j > i - window)
        if chunk is not None:
            seen = seen & (j // chunk == i // chunk)
        return seen

    return sees


def score_mod(formula: Formula, where: Where, slopes: Tensor | None, bias: Tensor | None) -> Mod | None:
    """slopes [q_heads] and bias [q_heads, width], float32, if the layer has them. None if scores are not modified."""
    if formula.softcap is None and slopes is None and bias is None:
        return None
    query_position, key_position, softcap = where.query_position, where.key_position, formula.softcap

    def modified(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is None and bias is None:
            return score
        i, j = query_position[q], key_position[kv]
        if slopes is not None:
            score = score + slopes[h] * (j - i)
        if bias is not None:
            column = j if formula.bias == "key" else i - j
            score = score + bias[h, torch.clamp(column, 0, bias.shape[1] - 1)]
        return score

    return modified


def attend(
    formula: Formula, query: Tensor, key: Tensor, value: Tensor, where: Where, slopes: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """query [1, q_heads, Q, dim], key and value [1, kv_heads, N, dim].

    Returns the output [1, q_heads, Q, v_dim] and, if the formula says so, the natural log-sum-exp [1, q_heads, Q].
    """
    mask = BlockMask.from_kv_blocks(
        where.block_counts,
        where.blocks,
        BLOCK_SIZE=(formula.tile, KEY_BLOCK),
        mask_mod=mask_mod(formula, where),
        seq_lengths=(query.shape[2], key.shape[2]),
        compute_q_blocks=False,
    )
    # The kernel for short queries is unsuitable: it packs the query heads of a KV head into BLOCK_M, which must then be a multiple of them.
    kernel: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    if formula.tile < KEY_BLOCK:
        kernel["BLOCK_M"] = formula.tile  # its own choice may be larger than the tile
    if bias is not None:
        kernel["num_stages"] = 1  # pipelined loads of the bias, a float32 per query and key, exceed Hopper's shared memory
    options: dict[str, Any] = {
        "scale": formula.scale,
        "enable_gqa": query.shape[1] != key.shape[1],
        "block_mask": mask,
        "kernel_options": kernel,
    }
    modified = score_mod(formula, where, slopes, bias)
    if not formula.lse:
        return flex_attention(query, key, value, modified, **options), None
    output, aux = flex_attention(query, key, value, modified, return_aux=AuxRequest(lse=True), **options)
    return output, aux.lse


def compiled(
    formula: Formula, query: Tensor, key: Tensor, value: Tensor, where: Where, slopes: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`attend`, compiled for all numbers of queries and keys; compiled again only if two sizes that were equal by chance differ."""
    for tensor in (query, key, value):
        maybe_mark_dynamic(tensor, 2)
    for tensor in where:
        maybe_mark_dynamic(tensor, tensor.dim() - 1)  # it does not accept -1
    maybe_mark_dynamic(where.blocks, 2)
    constants = (query.dtype, query.shape[1], key.shape[1], key.shape[3], value.shape[3], query.device)
    return _compiled(formula, constants)(query, key, value, where, slopes, bias)


@cache
def _compiled(formula: Formula, constants: tuple[Any, ...]) -> Attend:
    """Args: constants: properties of the operands that a kernel is compiled for; each combination gets its own function."""
    logger.info("flex_attention is compiled at its next call, which may take half a minute, for %s", formula)

    def call(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        return attend(formula, *arguments)

    # Dynamo counts recompiles by code object: sharing one, a few kinds of layers or head sizes would reach the limit.
    own_code = call.__code__.replace()
    # Not dynamic=True, which would make the formula's numbers symbolic too.
    own: Attend = torch.compile(FunctionType(own_code, globals(), closure=call.__closure__), fullgraph=True)
    return own
