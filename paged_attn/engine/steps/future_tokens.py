"""The forward of one step, captured or not. Tokens that the host does not know yet are read from the previous step, on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.batch.step_buffers import StepFetch
from paged_attn.backends.devices import device_word, has_triton
from paged_attn.engine.runners.runner import Runner

# A token for each row of logits [N, vocabulary], -1 for none; where to write them.
GreedyInGraph = Callable[[Tensor, Tensor | None], Tensor]
Output = tuple[Tensor, Tensor | None]  # logits [N, vocabulary], and the tokens [N] of `GreedyInGraph`
Rows = TypeVar("Rows", int, NDArray[np.int64])


def future_token(row: Rows) -> Rows:
    """The placeholder ids for the tokens that rows `row` of the previous step chose."""
    return -1 - row


class FutureTokens:
    """tokens [rows] int64 at a fixed address, so that captured graphs can read and write them; below 0 if a row has none.

    A row without a token is read as token 0: its request ends once the host knows.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # as StepBuffers
            self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def fetch(self) -> StepFetch | None:
        """What brings steps to the device with their placeholders replaced; None on devices without our kernels."""
        if device_word(self.tokens.device) != "cuda" or not has_triton():
            return None
        from paged_attn.backends.host_memory.fetch import FetchKernel

        return FetchKernel(self.tokens)

    def resolve(self, input_ids: Tensor) -> None:
        """Replace placeholders in input_ids [T] by their tokens; idempotent."""
        rows = (~input_ids).clamp_(min=0)
        torch.where(input_ids < 0, self.tokens.index_select(0, rows).clamp_(min=0), input_ids, out=input_ids)

    def first(self, rows: int) -> Tensor | None:
        """Memory for a step's tokens [rows]; None if so many do not fit."""
        return self.tokens[:rows] if rows <= len(self.tokens) else None

    def store(self, tokens: Tensor) -> None:
        """Store a step's tokens [N], as many as fit, unless they are here already."""
        if tokens.data_ptr() == self.tokens.data_ptr():
            return
        into = self.tokens[: len(tokens)]
        into.copy_(tokens[: len(into)])


def forward(runner: Runner, batch: Batch, sample: GreedyInGraph | None, future_tokens: FutureTokens) -> Output:
    """Run a step inside its forward context: reads tokens that the host does not know from `future_tokens`, and stores there what `sample`
    chooses, unless that is more than it has memory for."""
    if not batch.knows_tokens:
        future_tokens.resolve(batch.input_ids)
    logits = runner.forward(batch.input_ids, batch.positions, batch.logits_rows)
    if sample is None:
        return logits, None
    return logits, sample(logits, future_tokens.first(len(logits)))
