"""A step as it is, captured or not: tokens in, logits out, and what the sampling epilogue chose."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.engine.runners.runner import Runner
from paged_attn.engine.steps.future_tokens import FutureTokens

Tail = Callable[[Tensor], Tensor]
Output = tuple[Tensor, Tensor | None]  # logits [N, vocabulary], and the tokens [N] that the tail chooses


def forward(runner: Runner, batch: Batch, tail: Tail | None, future_tokens: FutureTokens) -> Output:
    """A step, under its context. It takes what the host did not know from `future_tokens`, and leaves there what the tail chose."""
    future_tokens.resolve(batch.input_ids)
    logits = runner.forward(batch.input_ids, batch.positions, batch.logits_rows)
    if tail is None:
        return logits, None
    tokens = tail(logits)
    future_tokens.store(tokens)
    return logits, tokens
