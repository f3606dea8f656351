"""A step that was launched, and whose tokens the host does not have yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.requests import RequestColumns, StateCheckpoint
from paged_attn.engine.requests.pooled_rows import PooledPart, PooledRows
from paged_attn.engine.requests.request import NO_SCORES, Request
from paged_attn.engine.requests.request_rows import RequestRows
from paged_attn.engine.sampling.prompt_scores import PromptScores, ScoredTokens
from paged_attn.engine.sampling.sampler_output import ChosenTokens, SampledToken, SamplerOutput
from paged_attn.engine.sampling.sampling_state import SamplingState
from paged_attn.engine.scheduling.step_plan import ScheduledStep
from paged_attn.engine.steps.forward import future_token

NONE_UNDER_WAY = -1

StepResult = tuple[Request, int, int, SampledToken | None, bool]
PooledResult = tuple[Request, PooledPart, Tensor]
ScoreResult = tuple[Request, list[SampledToken] | None]


class StepLayout(NamedTuple):
    """Of each request of a step the tokens from `starts` to `ends` are computed; for those `sampling` the next one is chosen.

    Columns [requests], as in `RequestColumns`; `samples` is an index of them that picks those `sampling`. `indices`: of the requests'
    rows in `rows`, while the step is launched. `states`: of those sampling that are no mere argmax, by their index among them. Of the
    tokens `num_of_prompts` are of requests for which nothing was chosen yet.
    `scored`: requests whose prompts get scores, and which. Only where there are any, `sample_rows` [sampling] says which rows of logits
    those sampling have; otherwise all rows are theirs. `pooled`: requests whose rows are wanted themselves, and which.
    """

    requests: list[Request]
    rows: RequestRows
    indices: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    sampling: list[Request]
    samples: NDArray[np.bool_] | slice
    states: dict[int, SamplingState]
    num_of_prompts: int
    scored: Sequence[tuple[Request, ScoredTokens]] = ()
    sample_rows: NDArray[np.int64] | None = None
    pooled: Sequence[tuple[Request, PooledPart]] = ()


def build_step(
    step: ScheduledStep,
    rows: RequestRows,
    indices: NDArray[np.int64],
    under_way: int,
    pools: bool = False,
    checkpoints: Mapping[int, Sequence[StateCheckpoint]] | None = None,
    frames: NDArray[np.int32] | None = None,
) -> tuple[StepLayout, RequestColumns]:
    """What each request's share of a step is, and what the batch is made of; the requests are at `indices` [requests] in `rows`, and the
    host has all tokens but those of the step that is `under_way` (its number). With `pools` the requests are embedded. `frames`
    [groups, pages]: the pool's pages, by group of layers, that the requests' pages stand for; None: these are the pool's."""
    requests, counts, samples = step.requests, step.counts, step.samples
    starts = rows.num_cached[indices]
    ends = starts + counts
    wanted = rows.scores_from[indices]
    num_logits = np.maximum(ends - np.maximum(starts, wanted), samples)
    num_pages, is_prompt = rows.num_pages[indices], rows.num_tokens[indices] == rows.num_prompt[indices]
    page_table, group_tables = rows.pages.take(indices, axis=0)[:, : num_pages.max(initial=0)], None
    if frames is not None:
        tables = frames.take(page_table, axis=1)
        page_table, group_tables = tables[0], tables[1:]
    columns = RequestColumns(
        tokens=_tokens(step, starts, future_token(rows.future_row[indices]), rows.produced_by[indices] == under_way),
        page_table=page_table,
        num_pages=num_pages,
        num_cached=starts,
        num_new=counts,
        num_logits=num_logits,
        state_slots=rows.state_slot[indices],
        lora_slots=rows.adapter[indices] - 1,
        checkpoints=checkpoints,
        group_tables=group_tables,
        lengths=rows.num_tokens[indices],
    )
    num_of_prompts = int(counts[is_prompt].sum())
    picked: NDArray[np.bool_] | slice = slice(None) if samples.all() else samples
    sampling = requests if isinstance(picked, slice) else list(compress(requests, samples.tolist()))
    others = (rows.is_argmax_only[indices[picked]] == 0).nonzero()[0].tolist()
    states = {row: sampling[row].sampling for row in others}
    layout = StepLayout(requests, rows, indices, starts, ends, sampling, picked, states, num_of_prompts)
    if pools or (wanted < NO_SCORES).any():
        past = num_logits.cumsum()
        layout = layout._replace(sample_rows=past[picked] - 1)
        if pools:
            return layout._replace(pooled=_pooled(requests, starts, ends, samples, past - num_logits)), columns
        return layout._replace(scored=_scored(requests, np.maximum(starts, wanted), ends, past - num_logits)), columns
    return layout, columns


def _pooled(
    requests: Sequence[Request], starts: NDArray[np.int64], ends: NDArray[np.int64], samples: NDArray[np.bool_], rows: NDArray[np.int64]
) -> list[tuple[Request, PooledPart]]:
    """Of requests that are embedded what this step adds: of "last" the end, of "cls" the beginning."""
    parts = []
    columns = zip(requests, starts.tolist(), ends.tolist(), samples.tolist(), rows.tolist(), strict=True)
    for request, start, end, is_last, row in columns:
        assert request.pooled is not None
        pooling = request.pooled.params.pooling
        if pooling == "mean" or (is_last if pooling == "last" else start == 0):
            parts.append((request, PooledPart(pooling, row, start, end)))
    return parts


def _scored(
    requests: Sequence[Request], firsts: NDArray[np.int64], ends: NDArray[np.int64], rows: NDArray[np.int64]
) -> list[tuple[Request, ScoredTokens]]:
    """Of requests whose tokens from `firsts` to `ends` have logits, in `rows` and after, those that score the next token of a prompt."""
    scored = []
    for index in (firsts < ends).nonzero()[0].tolist():
        request, first = requests[index], int(firsts[index])
        if tokens := request.prompt_token_ids[first + 1 : int(ends[index]) + 1]:
            assert request.params.prompt_logprobs is not None
            scored.append((request, ScoredTokens(int(rows[index]), tokens, request.params.prompt_logprobs)))
    return scored


def _tokens(
    step: ScheduledStep, starts: NDArray[np.int64], stand_ins: NDArray[np.int64], is_under_way: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """The tokens of all requests from `starts` on, one after another; one that `is_under_way` is the only one of its request."""
    if is_under_way.all():
        return stand_ins
    tokens, is_known = stand_ins.repeat(step.counts), ~is_under_way
    known: list[int] = []
    ends = starts + step.counts
    for request, start, end in zip(
        compress(step.requests, is_known.tolist()), starts[is_known].tolist(), ends[is_known].tolist(), strict=True
    ):
        known += request.tokens[start:end]
    tokens[is_known.repeat(step.counts)] = known
    return tokens


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
