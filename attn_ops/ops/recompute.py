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
    alone = _run_joined(context, spec, owned, output, layer_id) if spec.joined else range(len(context.batch.query_lens_host))
    starts = list(itertools.accumulate(context.batch.query_lens_host, initial=0))
    for request in alone:
        start, new, length = starts[request], context.batch.query_lens_host[request], context.batch.seq_lens_host[request]
        first = 0 if spec.reach is None else max(0, length - new - spec.reach)
        requests, positions = torch.full((length - first,), request), torch.arange(first, length)
        result = _rows_of(context, spec, owned, layer_id, requests, positions)
        output[start : start + new] = result[length - first - new :]
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


def _run_joined(context: ForwardContext, spec: RecomputeSpec, owned: Sequence[Tensor], output: Tensor, layer_id: int) -> list[int]:
    """Runs all requests at once whose new tokens have `reach` tokens before them; returns the other requests."""
    assert spec.reach is not None
    news, lengths = torch.tensor(context.batch.query_lens_host), torch.tensor(context.batch.seq_lens_host)
    fits = lengths - news >= spec.reach
    requests = fits.nonzero().flatten()
    if len(requests):
        counts = news[requests] + spec.reach
        within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)  # 0, 1, ... of each request
        positions = within + (lengths[requests] - counts).repeat_interleave(counts)
        result = _rows_of(context, spec, owned, layer_id, requests.repeat_interleave(counts), positions)
        new_ones = (within >= spec.reach).nonzero().flatten()
        rows = torch.arange(int(news.sum()))[fits.repeat_interleave(news)]
        output.index_copy_(0, rows.to(output.device), result.index_select(0, new_ones.to(output.device)).to(output.dtype))
    return (~fits).nonzero().flatten().tolist()


def _rows_of(
    context: ForwardContext, spec: RecomputeSpec, owned: Sequence[Tensor], layer_id: int, requests: Tensor, positions: Tensor
) -> Tensor:
    """The program's rows for these tokens, which it is given in this order. If they are too few for it, the last one is repeated, which
    changes no row before it."""
    batch, keys = context.batch, context.pool.key(layer_id)
    count, more = len(positions), max(0, spec.min_tokens - len(positions))
    requests, positions = (torch.cat([each, each[-1:].expand(more)]).to(keys.device) for each in (requests, positions))
    pages = batch.page_table.to(torch.int64)[requests, positions // batch.page_size]
    elements = keys[pages, positions % batch.page_size, 0]  # [tokens, elements of all rows]
    ends = list(itertools.accumulate((row.elements for row in spec.rows), initial=0))
    given = [row.restored(elements[:, start:end]) for row, start, end in zip(spec.rows, ends, ends[1:], strict=False)]
    return spec.program(count + more, given, owned)[:count]


RECOMPUTE_ATTENTION = define_op(
    "recompute_attention_with_output(Tensor[] rows, Tensor[] owned, Tensor(a!) output, int layer_id) -> ()", _run
)
