"""Turns a scheduled step into its layout, per request, and the columns from which its batch is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged_attn.attn_ops.batch.requests import RequestColumns, StateCheckpoint
from paged_attn.engine.requests.pooled_rows import PooledPart
from paged_attn.engine.requests.request import NO_SCORES, Request
from paged_attn.engine.requests.request_rows import RequestRows
from paged_attn.engine.sampling.sampler_output import ScoredTokens
from paged_attn.engine.sampling.sampling_state import SamplingState
from paged_attn.engine.scheduling.step_plan import ScheduledStep
from paged_attn.engine.steps.future_tokens import future_token

NONE_IN_FLIGHT = -1


class StepLayout(NamedTuple):
    """What a step computes: the tokens of each request from `starts` to `ends`, and the next token of each request in `sampling`.

    Columns are [requests], as in `RequestColumns`.

    Attributes:
        rows, indices: the requests' rows are at `indices` in `rows` while the step is launched.
        samples: index of columns that picks the requests in `sampling`.
        states: sampling states of requests that need more than argmax, by index in `sampling`.
        num_of_prompts: how many of the step's tokens belong to requests without a new token.
        scored: requests whose prompts get scores, with the scored tokens.
        sample_rows: [sampling], the rows of logits to sample from, if some rows are for scores or pooling; None: all rows.
        pooled: requests that are embedded, with the rows to pool.
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
    in_flight: int,
    pools: bool = False,
    checkpoints: Mapping[int, Sequence[StateCheckpoint]] | None = None,
    frames: NDArray[np.int32] | None = None,
) -> tuple[StepLayout, RequestColumns]:
    """The layout of a step, and the columns of its batch.

    Args:
        rows, indices: the requests are at `indices` [requests] in `rows`.
        in_flight: number of the step whose tokens the host does not know yet.
        pools: the requests are embedded.
        frames: [groups, pages], the pool's page for each page of a request, by group of layers; None: they are the same.
    """
    requests, counts, samples = step.requests, step.counts, step.samples
    starts = rows.num_cached[indices]
    ends = starts + counts
    wanted = rows.scores_from[indices]
    num_logits = np.maximum(ends - np.maximum(starts, wanted), samples)
    tokens = _tokens(step, starts, future_token(rows.future_row[indices]), rows.produced_by[indices] == in_flight)
    num_pages = rows.num_pages[indices]
    page_table, group_tables = rows.pages.take(indices, axis=0)[:, : num_pages.max(initial=0)], None
    if frames is not None:
        tables = frames.take(page_table, axis=1)
        page_table, group_tables = tables[0], tables[1:]
    columns = RequestColumns(
        tokens=tokens,
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
    num_of_prompts = int(counts[rows.num_tokens[indices] == rows.num_prompt[indices]].sum())
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
    """What this step adds for requests that are embedded: for "last" only their end, for "cls" only their beginning."""
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
    """Requests that score the next token of a prompt, among those whose tokens from `firsts` to `ends` have logits, in `rows` and after."""
    scored = []
    for index in (firsts < ends).nonzero()[0].tolist():
        request, first = requests[index], int(firsts[index])
        if tokens := request.prompt_token_ids[first + 1 : int(ends[index]) + 1]:
            assert request.params.prompt_logprobs is not None
            scored.append((request, ScoredTokens(int(rows[index]), tokens, request.params.prompt_logprobs)))
    return scored


def _tokens(
    step: ScheduledStep, starts: NDArray[np.int64], stand_ins: NDArray[np.int64], is_pending: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """The tokens of all requests from `starts` on, one after another; one that `is_pending` is the only one of its request."""
    if is_pending.all():
        return stand_ins
    is_known, known = ~is_pending, list[int]()
    ends = starts + step.counts
    for request, start, end in zip(
        compress(step.requests, is_known.tolist()), starts[is_known].tolist(), ends[is_known].tolist(), strict=True
    ):
        known += request.tokens[start:end]
    if is_known.all():
        return np.array(known, np.int64)
    tokens = stand_ins.repeat(step.counts)
    tokens[is_known.repeat(step.counts)] = known
    return tokens
