"""Ops that give each row's numbers from the batch, for models that count tokens themselves.

`torch.ops.paged_attn.batch_positions_with_output`: each row's position, for models that take no position_ids.
`torch.ops.paged_attn.request_lengths_with_output`: the number of tokens of each row's request, for rotary embeddings whose frequencies
depend on the length of the call (longrope). In a paged batch a request takes the place of a call, whichever of its tokens a step computes.

Like attention they read the thread's forward context and mutate only `output`, so one graph serves every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.context import context_of, current_context
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.ops.define import define_op


def _positions(output: Tensor) -> None:
    """output [T] or [1, T] int64: each row's position in its own request; 0 in rows past the batch's real tokens.

    Raises:
        ContextError: no forward context, a different number of rows than the batch has, or another dtype or shape.
    """
    if output.dtype != torch.int64 or output.dim() not in (1, 2) or (output.dim() == 2 and output.shape[0] != 1):
        raise ContextError(f"batch positions got an output {list(output.shape)} of {output.dtype}; allowed is [T] or [1, T] of torch.int64")
    batch = context_of("batch_positions_with_output", output.shape[-1]).batch
    rows = output.view(-1)
    rows.copy_(batch.positions)
    rows[batch.num_tokens :].zero_()


BATCH_POSITIONS = define_op("batch_positions_with_output(Tensor(a!) output) -> ()", _positions)


def _lengths(positions: Tensor, output: Tensor) -> None:
    """output [T] int64: how many tokens each row's request has, including those of later steps. Without a forward context, the call is one
    request whose length is the last of positions [..., T] plus one.

    Raises:
        ContextError: a different number of rows than the batch has, or another dtype or shape.
    """
    if output.dtype != torch.int64 or output.dim() != 1:
        raise ContextError(f"request lengths got an output {list(output.shape)} of {output.dtype}; allowed is [T] of torch.int64")
    context = current_context()
    if context is None or not context.rewritten:
        output.copy_((positions.amax() + 1).expand_as(output))
        return
    batch = context_of("request_lengths_with_output", len(output)).batch
    if batch.num_requests == 0:
        output.zero_()
        return
    if batch.num_requests == len(output):  # one row per request
        output.copy_(batch.request_lens)
        return
    rows = torch.arange(len(output), dtype=batch.query_start.dtype, device=output.device)
    owners = torch.searchsorted(batch.query_start[1:], rows, right=True)
    # Padding comes after the last request.
    output.copy_(batch.request_lens[owners.clamp_(max=batch.num_requests - 1)])


REQUEST_LENGTHS = define_op("request_lengths_with_output(Tensor positions, Tensor(a!) output) -> ()", _lengths)
