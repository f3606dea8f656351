"""`torch.ops.paged_attn.recompute_attention_with_output`: attention that is recomputed from all tokens of every request.

It mutates only `output`. The layer's inputs for the new tokens are stored in its pages; then all of each request's tokens, old and new,
are gathered, and the layer's program (`RecomputeSpec`) runs on them. A step costs as much as running the whole request once more, unless
the program needs only the last tokens (`reach`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from paged_attn.attn_ops.context import ForwardContext, context_of
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.ops.define import define_op
from paged_attn.attn_ops.specs.recompute import RecomputeSpec


def _run(rows: Sequence[Tensor], owned: Sequence[Tensor], output: Tensor, layer_id: int) -> None:
    """rows: one [T, width] for each of the spec's; owned: the program's operands; output [T, heads, v_dim].

    Rows past the batch's real tokens are zeroed; neither they nor pages of other requests are read.
    """
    context = context_of("recompute_attention_with_output", output.shape[0])
    spec = context.layers[layer_id] if 0 <= layer_id < len(context.layers) else None
    if not isinstance(spec, RecomputeSpec) or [row.shape[1] for row in rows] != [row.width for row in spec.rows]:
        raise ContextError(
            f"layer {layer_id} of the pool is not the model's, which is recomputed from {[row.shape[1] for row in rows]} values a token; "
            "allocate the pool with attention_layers(compiled)"
        )
    _store(context, spec, rows, layer_id)
    starts = itertools.accumulate(context.batch.query_lens_host, initial=0)
    for request, (start, new) in enumerate(zip(starts, context.batch.query_lens_host, strict=False)):
        length = context.batch.seq_lens_host[request]
        first = 0 if spec.reach is None else max(0, length - new - spec.reach)
        count = max(length - first, spec.min_tokens)  # padded with copies of the last token, which change no row before them
        result = spec.program(count, _tokens(context, spec, layer_id, request, first, count), owned)
        output[start : start + new] = result[length - first - new : length - first]
    output[context.batch.num_tokens :].zero_()


def _store(context: ForwardContext, spec: RecomputeSpec, rows: Sequence[Tensor], layer_id: int) -> None:
    """Write the real tokens' rows to their slots."""
    batch, keys = context.batch, context.pool.key(layer_id)
    slots = batch.slots[: batch.num_tokens]
    index = (slots // batch.page_size, slots % batch.page_size)
    offset = 0
    for row, values in zip(spec.rows, rows, strict=True):
        elements = row.stored(values[: batch.num_tokens], keys.dtype)
        keys[:, :, 0, offset : offset + elements.shape[1]].index_put_(index, elements)
        offset += row.elements


def _tokens(context: ForwardContext, spec: RecomputeSpec, layer_id: int, request: int, first: int, count: int) -> list[Tensor]:
    """The program's tensors for one request from its token `first` on, padded to `count` tokens by repeating the last one."""
    batch, keys = context.batch, context.pool.key(layer_id)
    positions = torch.arange(first, first + count, device=keys.device).clamp(max=batch.seq_lens_host[request] - 1)
    pages = batch.page_table[request].to(torch.int64)[positions // batch.page_size]
    elements = keys[pages, positions % batch.page_size, 0]  # [count, elements of all rows]
    ends = list(itertools.accumulate((row.elements for row in spec.rows), initial=0))
    return [row.restored(elements[:, start:end]) for row, start, end in zip(spec.rows, ends, ends[1:], strict=False)]


RECOMPUTE_ATTENTION = define_op(
    "recompute_attention_with_output(Tensor[] rows, Tensor[] owned, Tensor(a!) output, int layer_id) -> ()", _run
)
