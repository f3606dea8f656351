"""Decides, after a step that raised, which requests end and whether the engine still works."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from paged_attn.asynchronous.job import Job
from paged_attn.engine.engine import Engine
from paged_attn.engine.requests.outputs import FinishReason
from paged_attn.engine.sampling_params import SamplingParams

DOUBTFUL = 3  # failed steps in a row after which no new request is admitted until a step works


class FailedSteps:
    """How many there were in a row, and what is due because of them.

    Attributes:
        probe_due: a step failed, and no probe has run since.
        events_due: a step failed: the next one brings the events that were due.
    """

    def __init__(self) -> None:
        self.probe_due = self.events_due = False
        self._in_a_row = 0

    @property
    def hold_back(self) -> bool:
        """Nothing new is let in until a probe has run."""
        return self._in_a_row >= DOUBTFUL and self.probe_due

    def one_failed(self) -> None:
        self._in_a_row += 1
        self.probe_due = self.events_due = True

    def one_worked(self) -> None:
        self._in_a_row = 0

    def probe(self, engine: Engine) -> None:
        """One token on an idle engine. Raises RuntimeError: it gave none; Exception: whatever its steps raised."""
        pooler = engine.pooler
        if pooler is None:
            request = engine.add_request([0], SamplingParams(max_new_tokens=1, ignore_eos=True))
        else:
            request = engine.add_request([pooler.some_id], pooler.params(engine.is_causal))
        while engine.has_work:
            engine.step()
        if request.finish_reason is not FinishReason.LENGTH:
            raise RuntimeError(f"after a failed step, a probe of one token ended with {request.finish_reason}: {request.error}")
        self.probe_due, self._in_a_row = False, 0


def hit_by_failed_step(engine: Engine, owners: Mapping[str, tuple[Job, int]]) -> set[Job]:
    """Jobs of the requests of the step that raised. Where there was none yet (the scheduler raised), of all that run; then of the first
    that waits; then of all: every failed step ends at least one request. Events of those that had ended come with the next step.

    Args:
        owners: of the engine's requests, by id: the job, and which of its requests.
    """
    owned = [job.requests[index] for job, index in owners.values()]
    for requests in (engine.last_scheduled, engine.scheduler.running, islice(engine.scheduler.waiting, 1), owned):
        if hit := {owners[r.id][0] for r in requests if r.id in owners and r.finish_reason is None}:
            return hit
    return set()
