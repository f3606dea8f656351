"""A step that is laid out from the rows of its requests equals one that is laid out from the requests, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_attn import SamplingParams
from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.batch.step_buffers import StepBuffers, StepShape
from paged_attn.engine.requests.request_rows import RequestRows
from paged_attn.engine.scheduling.running_set import RunningSet
from paged_attn.engine.steps.future_tokens import future_token
from paged_attn.engine.steps.step_layout import NONE_IN_FLIGHT, build_step
from tests.engine.models import assert_idle, make_engine, oracle, random_prompts, request_of, tokenizer
from tests.engine.scheduling.schedulers import Scheduled
from tests.engine.scheduling.test_scheduling_world import ANYTHING, WITH_STATES, simulate
from tests.engine.scheduling.world import World


def one_by_one(scheduled: Scheduled) -> BatchRequest:
    request = scheduled.request
    tokens = request.tokens[request.num_cached : request.num_cached + scheduled.count]
    if len(tokens) < scheduled.count:
        tokens = [*tokens, future_token(request.future_row)]
    return BatchRequest(
        tokens, list(request.pages), request.num_cached, int(scheduled.samples), request.state_slot, length=request.num_tokens
    )


def assert_equal(got: Batch, expected: Batch) -> None:
    for name, value in vars(expected).items():
        same = torch.equal(value, getattr(got, name)) if isinstance(value, torch.Tensor) else np.array_equal(value, getattr(got, name))
        assert same, f"{name}: {getattr(got, name)} instead of {value}"


class LaidOut(World):
    """Lays out every step both ways. (That a request's pages are the right ones the world knows from what they hold.)"""

    number = 0  # of the last step that was laid out

    def _check_step(self, scheduled: Sequence[Scheduled]) -> None:
        super()._check_step(scheduled)
        running = self.scheduler.running
        assert running.in_order()[0] == list(running)
        parts, columns = build_step(
            self.step_made, running.rows, running.indices(self.step_made.requests), self.number if self.flights else NONE_IN_FLIGHT
        )
        rows = [one_by_one(each) for each in scheduled]
        assert columns.rows() == rows
        assert_equal(Batch.build(columns, self.page_size), Batch.build(rows, self.page_size))
        if columns.all_decode:
            shape = StepShape(16, 16, 16)
            got, expected = (
                Batch.build(each, self.page_size, "cpu", shape, StepBuffers(16, 16, 16, 64, "cpu")) for each in (columns, rows)
            )
            assert_equal(got, expected)
        assert parts.sampling == [each.request for each in scheduled if each.samples]
        self.number += 1
        for row, request in enumerate(parts.sampling):
            request.future_row, request.produced_by = row, self.number


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(prefix_cache=st.booleans(), **ANYTHING)
def test_every_step_is_laid_out_as_from_its_requests(**drawn: Any) -> None:
    simulate(snapshots=None, make=LaidOut, **drawn)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(**WITH_STATES, **ANYTHING)
def test_so_it_is_with_recurrent_states(**drawn: Any) -> None:
    simulate(make=LaidOut, **drawn)


def test_a_request_takes_its_numbers_and_pages_along_and_leaves_nothing() -> None:
    running, request = RunningSet(2), request_of([1, 2, 3])
    request.add_pages([7, 9])
    request.num_cached, request.state_slot = 2, 5
    running.add(request)
    request.add_pages([4] * 9)
    request.replace_page(1, 8)
    other = request_of([1])
    running.add(other)
    other.add_pages([3])
    assert request.pages == (7, 8, *[4] * 9) and (request.num_cached, request.num_tokens, request.state_slot) == (2, 3, 5)
    running.remove(request)
    assert request.pages == (7, 8, *[4] * 9) and (request.num_cached, request.num_tokens, request.state_slot) == (2, 3, 5)
    assert other.pages == (3,) and np.count_nonzero(running.rows.pages) == 1
    running.add(request_of([5, 6]))
    assert [each.num_tokens for each in running] == [1, 2] and not list(running)[1].pages
    running.remove(other)
    assert [running.rows.num_tokens[at] for at in running.in_order()[1]] == [2]


def test_rows_that_get_a_page_each_become_wider() -> None:
    rows = RequestRows(3)
    places = np.array([rows.take(), rows.take(), rows.take()])
    rows.add_pages(places[1], [5])
    rows.add_page_each(places[[1, 2]], [6, 7])
    rows.clear_pages(places[2])
    rows.add_page_each(places[[2, 1]], [8, 9])
    assert rows.num_pages[places].tolist() == [0, 3, 1]
    assert rows.pages[places, :3].tolist() == [[0, 0, 0], [5, 6, 9], [8, 0, 0]] and not rows.pages[:, 3:].any()


@pytest.mark.parametrize("step_tokens", [None, 3])  # with 3 the requests that decode are not all in every step
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("at_call", [0, 1, 2, 9])
def test_what_a_step_cut_short_leaves_over_is_taken_in_later(
    overlap: bool, at_call: int, step_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five requests the third is decoded as it grows, and that is cut short once, in the middle of a step's tokens (a tokenizer's
    own errors end its request: tests/engine/test_failures.py)."""
    engine = make_engine(tokenizer=tokenizer(), overlap=overlap, max_batch_tokens=step_tokens)
    prompts = random_prompts(0, 6, 19, 11, 5, 8)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    requests = [engine.add_request(prompt, params, text_at_end=index != 2) for index, prompt in enumerate(prompts)]
    append, calls = requests[2].detokenizer.append, iter(range(10**9))

    def failing(token_id: int) -> str:
        text = append(token_id)
        if next(calls) == at_call:
            raise MemoryError
        return text

    monkeypatch.setattr(requests[2].detokenizer, "append", failing)
    events, raised = [], 0
    while engine.has_work:
        try:
            events += engine.step()
        except MemoryError:
            raised += 1
    told = {request.id: [event.token_id for event in events if event.request_id == request.id] for request in requests}
    for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        expected = oracle(prompt, 12)
        assert request.output_token_ids == expected
        if index == 2:
            del expected[at_call]
        assert told[request.id] == expected, "only the event of the token that failed is lost"
    assert raised == 1 and engine.stats.new_tokens == 60
    assert_idle(engine)
