"""What every op that reads the forward context asks first."""

from __future__ import annotations

from paged_attn.attn_ops.context import ForwardContext, current_context
from paged_attn.attn_ops.errors import ContextError


def context_of(op: str, rows: int) -> ForwardContext:
    """The thread's context, whose batch has as many rows as the op was given.

    Raises:
        ContextError: there is none, or its batch is another one.
    """
    context = current_context()
    if context is None:
        raise ContextError(f"{op} was called outside any forward context; wrap the call in `with paged_attn.forward_context(batch, pool):`")
    if rows != context.batch.num_rows:
        raise ContextError(
            f"attention got {rows} rows but the forward context's batch has {context.batch.num_rows}; "
            "call the model with batch.model_inputs()"
        )
    return context
