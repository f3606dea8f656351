"""A step as it is, captured or not; tokens that the host does not know yet come from the step before, on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.engine.runners.runner import Runner

SampleInGraph = Callable[[Tensor], Tensor]  # a token for each row of logits [N, vocabulary], -1 for none
Output = tuple[Tensor, Tensor | None]  # logits [N, vocabulary], and the tokens [N] that were sampled in the graph
Rows = TypeVar("Rows", int, NDArray[np.int64])


def future_token(row: Rows) -> Rows:
    """The token id, or ids, that stand for "what row `row` of the last step chose"."""
    return -1 - row


class FutureTokens:
    """tokens [rows] int64, at one address, so that captured graphs may read and write it."""

    def __init__(self, rows: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # as StepBuffers
            self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def resolve(self, input_ids: Tensor) -> None:
        """Replace what stands for a token in input_ids [T] by that token; doing it twice changes nothing."""
        rows = (~input_ids).clamp_(min=0)
        torch.where(input_ids < 0, self.tokens.index_select(0, rows), input_ids, out=input_ids)

    def store(self, tokens: Tensor) -> None:
        """Take a step's tokens [N], as far as there is room; a row that has none (-1) counts as token 0: its request ends when the host
        knows."""
        into = self.tokens[: len(tokens)]
        torch.clamp(tokens[: len(into)], min=0, out=into)


def forward(runner: Runner, batch: Batch, sample: SampleInGraph | None, future_tokens: FutureTokens) -> Output:
    """A step, under its context. It takes what the host did not know from `future_tokens`, and leaves there what `sample` chose."""
    future_tokens.resolve(batch.input_ids)
    logits = runner.forward(batch.input_ids, batch.positions, batch.logits_rows)
    if sample is None:
        return logits, None
    tokens = sample(logits)
    future_tokens.store(tokens)
    return logits, tokens
