"""`torch.ops.paged_attn.batch_positions_with_output`: the positions of the batch, for models that take no position_ids.

Like attention it reads the thread's forward context and mutates `output` alone, so that one graph serves every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.context import current_context
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.ops.define import define_op


def _run(output: Tensor) -> None:
    """output [T] or [1, T] int64: each row's position in its own request; 0 in rows past the batch's real tokens.

    Raises:
        ContextError: no forward context, another number of rows than the batch has, or another dtype or shape.
    """
    context = current_context()
    if context is None:
        raise ContextError(
            "batch_positions_with_output was called outside any forward context; "
            "wrap the call in `with paged_attn.forward_context(batch, pool):`"
        )
    batch = context.batch
    if output.dtype != torch.int64 or output.dim() not in (1, 2) or (output.dim() == 2 and output.shape[0] != 1):
        raise ContextError(f"batch positions got an output {list(output.shape)} of {output.dtype}; allowed is [T] or [1, T] of torch.int64")
    if output.shape[-1] != batch.num_rows:
        raise ContextError(
            f"batch positions got {output.shape[-1]} rows but the forward context's batch has {batch.num_rows}; "
            "call the model with the batch's own input_ids"
        )
    rows = output.view(-1)
    rows.copy_(batch.positions)
    rows[batch.num_tokens :].zero_()


BATCH_POSITIONS = define_op("batch_positions_with_output(Tensor(a!) output) -> ()", _run)
