"""A step that was launched and whose tokens are not on the host yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import copy_to_device
from paged_attn.engine.requests.pooled_rows import PooledPart, PooledRows
from paged_attn.engine.requests.request import Request
from paged_attn.engine.sampling.sampler import Sampler
from paged_attn.engine.sampling.sampler_output import BAD_LOGITS, ChosenTokens, PromptScores, SampledToken, SamplerOutput
from paged_attn.engine.steps.future_tokens import FutureTokens
from paged_attn.engine.steps.step_layout import StepLayout

if TYPE_CHECKING:
    from paged_attn.engine.steps.step_runner import StepOutput

StepResult = tuple[Request, int, int, SampledToken | None, bool]
PooledResult = tuple[Request, PooledPart, Tensor]
ScoreResult = tuple[Request, list[SampledToken] | None]


class InFlightStep:
    """A launched step. `begin` advances its requests as if it had finished, `rollback` undoes that.

    Args:
        number: unique and positive.
        scores, pooled: for `layout.scored` and `layout.pooled`; None if those are empty.

    Attributes:
        chosen: a row for each request that samples, in order, once `choose` was called; None if none does.
    """

    def __init__(self, layout: StepLayout, number: int, scores: PromptScores | None = None, pooled: PooledRows | None = None) -> None:
        self.number = number
        self.chosen: SamplerOutput | None = None
        self.prompt_scores, self.pooled_rows = scores, pooled
        self.layout = layout
        self.requests = layout.requests
        self._results: Iterator[StepResult] | None = None
        self._scores: Iterator[ScoreResult] = iter(())
        self._pooled: Iterator[PooledResult] = iter(())
        self._goes_on: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def begin(self) -> None:
        """Advance all requests at once as if the step had finished. Their rows must still be where the layout says."""
        layout, number = self.layout, self.number
        rows, sampling = layout.rows, layout.indices[layout.samples]
        num_tokens = rows.num_tokens[sampling] + 1
        is_inner = (num_tokens > rows.num_prompt[sampling] + 1) & (num_tokens < rows.token_limit[sampling])
        self._goes_on = is_inner & (rows.skips_host_work[sampling] > 0)
        rows.future_row[sampling] = np.arange(len(sampling))
        rows.produced_by[sampling] = number
        rows.num_cached[layout.indices] = layout.ends
        rows.num_tokens[sampling] = num_tokens

    def choose(self, sampler: Sampler, output: StepOutput, future_tokens: FutureTokens) -> None:
        """Launch the choice of its tokens, and store them for the next step. Requests that have ended since the step began do not count:
        their tokens are discarded."""
        layout = self.layout
        if all(request.finish_reason is not None for request in layout.sampling):
            return
        for row in [row for row in layout.states if layout.sampling[row].finish_reason is not None]:
            del layout.states[row]
        logits, greedy_tokens = output.logits, output.greedy_tokens
        if layout.sample_rows is not None:
            logits, greedy_tokens = logits.index_select(0, copy_to_device(layout.sample_rows, logits.device)), None
        chosen = sampler.choose(logits, layout.states, greedy_tokens)
        future_tokens.store(chosen.tokens)
        self.chosen = chosen
        for state in layout.states.values():
            state.num_chosen += 1

    def wait(self) -> None:
        """Wait until the tokens are on the host."""
        if self._results is None:
            num_rows = len(self.layout.sampling)  # all of them of requests that have ended if nothing was chosen
            tokens = self.chosen.wait() if self.chosen is not None else ChosenTokens([BAD_LOGITS] * num_rows, [None] * num_rows)
            if self.prompt_scores is not None:
                self._scores = zip((request for request, _ in self.layout.scored), self.prompt_scores.wait(), strict=True)
            if self.pooled_rows is not None:
                rows = self.pooled_rows.wait()
                self._pooled = ((request, *row) for (request, _), row in zip(self.layout.pooled, rows, strict=True))
            ends = self.layout.ends[self.layout.samples]
            self._results = zip(self.layout.sampling, ends.tolist(), *tokens, self._goes_on.tolist(), strict=True)

    @property
    def has_arrived(self) -> bool:
        """Whether the tokens are on the host; some may already have been processed."""
        return self._results is not None

    def results(self) -> Iterator[StepResult]:
        """Each request that samples, with the end of its computed tokens, its new token (-1: logits were not finite), the token with
        log-probabilities if the request wants them, and whether it is a plain token: neither the request's first nor its last one, of a
        request that `skips_host_work`. Each comes once; if the caller raises, the next call continues with the rest."""
        self.wait()
        assert self._results is not None
        return self._results

    def scores(self) -> Iterator[ScoreResult]:
        """Each request whose prompt got scores, with the scored tokens (None: logits were not finite); each once, as in `results`."""
        self.wait()
        return self._scores

    def pooled(self) -> Iterator[PooledResult]:
        """Each request whose hidden states are wanted, with the part that the step adds and its row [W] float32; each once, as in
        `results`."""
        self.wait()
        return self._pooled

    def rollback(self) -> list[Request]:
        """Undo `begin` of a step whose tokens have not arrived, after any later step was rolled back; returns its unfinished requests."""
        assert not self.has_arrived
        for request in self.layout.sampling:
            request.drop_pending_token()
        if self.chosen is not None:
            for state in self.layout.states.values():
                state.num_chosen -= 1
        for request, start in zip(self.requests, self.layout.starts.tolist(), strict=True):
            if request.finish_reason is None:
                request.num_cached = min(request.num_cached, start)
        return [request for request in reversed(self.requests) if request.finish_reason is None]
