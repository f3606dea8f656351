"""A step that was launched and whose tokens are not on the host yet."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.engine.requests.pooled_rows import PooledPart, PooledRows
from paged_attn.engine.requests.request import Request
from paged_attn.engine.sampling.prompt_scores import PromptScores
from paged_attn.engine.sampling.sampler_output import ChosenTokens, SampledToken, SamplerOutput
from paged_attn.engine.steps.step_layout import StepLayout

StepResult = tuple[Request, int, int, SampledToken | None, bool]
PooledResult = tuple[Request, PooledPart, Tensor]
ScoreResult = tuple[Request, list[SampledToken] | None]


class InFlightStep:
    """A step that runs. Its requests count it as done from now on.

    Args:
        chosen: a row for each request that samples, in order; None if none does.
        number: above 0, and that of no other step.
        scores, pooled: of `layout.scored` and `layout.pooled`; None if that is empty.
    """

    def __init__(
        self,
        layout: StepLayout,
        chosen: SamplerOutput | None,
        number: int,
        scores: PromptScores | None = None,
        pooled: PooledRows | None = None,
    ) -> None:
        self.number = number
        self.chosen, self.prompt_scores, self.pooled_rows = chosen, scores, pooled
        self.layout = layout
        self.requests = layout.requests
        self._results: Iterator[StepResult] | None = None
        self._scores: Iterator[ScoreResult] = iter(())
        self._pooled: Iterator[PooledResult] = iter(())
        self._goes_on: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def begin(self) -> InFlightStep:
        """Count the step as done, for all of its requests at once, while they are where the layout says."""
        layout, number = self.layout, self.number
        rows, sampling = layout.rows, layout.indices[layout.samples]
        rows.num_cached[layout.indices] = layout.ends
        num_tokens = rows.num_tokens[sampling] + 1
        rows.num_tokens[sampling] = num_tokens
        rows.future_row[sampling] = np.arange(len(sampling))
        rows.produced_by[sampling] = number
        for state in layout.states.values():
            state.num_chosen += 1
        is_inner = (num_tokens > rows.num_prompt[sampling] + 1) & (num_tokens < rows.token_limit[sampling])
        self._goes_on = is_inner & (rows.skips_host_work[sampling] > 0)
        return self

    def wait(self) -> None:
        """Until the tokens are there."""
        if self._results is None:
            tokens = self.chosen.wait() if self.chosen is not None else ChosenTokens([], [])
            if self.prompt_scores is not None:
                self._scores = zip((request for request, _ in self.layout.scored), self.prompt_scores.wait(), strict=True)
            if self.pooled_rows is not None:
                rows = self.pooled_rows.wait()
                self._pooled = ((request, *row) for (request, _), row in zip(self.layout.pooled, rows, strict=True))
            ends = self.layout.ends[self.layout.samples]
            self._results = zip(self.layout.sampling, ends.tolist(), *tokens, self._goes_on.tolist(), strict=True)

    @property
    def has_come(self) -> bool:
        """Whether the tokens are there, and some may have been taken in."""
        return self._results is not None

    def results(self) -> Iterator[StepResult]:
        """Each request that samples, once: what an exception of the caller leaves over comes at the next call. With it come up to where it
        was computed, its token (-1: logits were not finite), the token with log-probabilities if it asks for them, and whether the token is
        neither its first nor its last one and it `skips_host_work`."""
        self.wait()
        assert self._results is not None
        return self._results

    def scores(self) -> Iterator[ScoreResult]:
        """Each request whose prompt got scores, once as above; with it the scored tokens, None where logits were not finite."""
        self.wait()
        return self._scores

    def pooled(self) -> Iterator[PooledResult]:
        """Each request whose hidden states are wanted, once as above; with it what the step adds: the part and its row [W] float32."""
        self.wait()
        return self._pooled

    def rollback(self) -> list[Request]:
        """The step, whose tokens have not come, did not happen, nor did any after it; the requests that it was for."""
        assert not self.has_come
        for request in self.layout.sampling:
            request.drop_pending_token()
        for state in self.layout.states.values():
            state.num_chosen -= 1
        for request, start in zip(self.requests, self.layout.starts.tolist(), strict=True):
            if request.finish_reason is None:
                request.num_cached = min(request.num_cached, start)
        return [request for request in reversed(self.requests) if request.finish_reason is None]
