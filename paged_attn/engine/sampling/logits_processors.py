"""A request's own logits processors, whose errors are its own."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.model_code import model_code
from paged_attn.engine.sampling.sampling_state import SamplingState
from paged_attn.engine.sampling_params import LogitsProcessor


def process(state: SamplingState, scores: Tensor) -> None:
    """Scores [1, V], in place, by the processors of a request. What one of them raises is the request's own error (`SamplingState.error`):
    its scores are NaN then, and other requests go on."""
    state.error = None
    try:
        for processor in state.params.logits_processors:
            scores.copy_(_processed(processor, state, scores))
    except ValueError as error:
        state.error = error
        scores.fill_(torch.nan)


def _processed(processor: LogitsProcessor, state: SamplingState, scores: Tensor) -> Tensor:
    """Raises ValueError: it raised something, or returned no such scores."""

    def raised(why: str) -> ValueError:
        return ValueError(f"the logits processor {processor!r} raised {why}")

    with model_code(raised):
        result = processor(torch.tensor([state.tokens], dtype=torch.int64, device=scores.device), scores.clone())
    if not isinstance(result, Tensor) or result.shape != scores.shape:
        got = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else repr(type(result).__name__)
        raise ValueError(
            f"the logits processor {processor!r} returned {got}; allowed: scores of shape {tuple(scores.shape)}, as it got: "
            "processor(input_ids [1, T], scores [1, V]) -> scores [1, V]"
        )
    return result
