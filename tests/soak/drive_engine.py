"""An engine under one caller who adds, cancels, breaks and steps in an order that the seed decides."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest

from paged_attn import SamplingParams, UnsupportedError
from paged_attn.engine.engine import Engine
from paged_attn.engine.requests.outputs import TokenEvent
from paged_attn.engine.requests.request import Request
from paged_attn.engine.sampling import sampling_state
from tests.engine.memory.radix_invariants import check_invariants
from tests.engine.models import poisoned
from tests.soak.build import Faults, Injected, assert_closed, assert_nothing_held, book_of, make_llm, model_of
from tests.soak.cases import BAD, Case, Outcome
from tests.soak.plan import Plan

MAX_LIVE = 24
STUCK = 4000  # steps without a token


@dataclass
class Live:
    """A request in the engine: its case, what its events brought, and whether it was cancelled."""

    case: Case
    request: Request
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ended: str | None = None
    cut: bool = False

    def take(self, event: TokenEvent) -> None:
        assert self.ended is None and not self.cut, f"an event after the end: {event}"
        assert self.request.id == event.request_id
        if event.token_id is not None:
            self.tokens.append(event.token_id)
        self.text += event.text
        self.ended = event.finish_reason

    def verify(self) -> None:
        request = self.request
        if not self.cut:
            assert self.ended == request.finish_reason, f"{request.id} ended with {request.finish_reason}; its events say {self.ended}"
            assert self.text == request.detokenizer.text, f"events of {request.id}: {self.text!r}, in all {request.detokenizer.text!r}"
        told = request.output_token_ids[: len(self.tokens)] if self.cut else request.output_token_ids  # events may have been due
        assert self.tokens == told, f"events of {request.id}: {self.tokens}, in all {request.output_token_ids}"
        known = None if request.params.logprobs is None else [s.logprob for s in request.logprobs if s.logprob is not None]
        reason = str(request.finish_reason)
        outcome = Outcome(request.output_token_ids, request.detokenizer.text, reason, request.stop_reason, known, str(request.error))
        self.case.check(outcome, self.cut)


class EngineRound:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng, self.seen = plan, plan.rng("turns"), Counter[str]()
        self.book = book_of(plan)
        self.engine: Engine = make_llm(plan).engine
        self.faults = Faults(self.engine, plan.rng("faults"))
        self.live: dict[str, Live] = {}

    def run(self) -> Counter[str]:
        turn, idle_steps = 0, 0
        with poisoned(model_of(self.plan)):
            while turn < self.plan.turns or (self.engine.has_work and not self.plan.abrupt):
                turn += 1
                if turn < self.plan.turns:
                    self._add_some()
                    self._disturb()
                idle_steps = 0 if self._step() else idle_steps + 1
                assert idle_steps < STUCK, f"{STUCK} steps without an event; {len(self.live)} requests live"
                if self.rng.random() < 0.02 and self.engine.kv.tree is not None:
                    check_invariants(self.engine.kv.tree)
            if self.plan.abrupt:
                self.seen["requests at close()"] += len(self.live)
                self.engine.close()
        for live in self.live.values():  # what close() ended
            live.cut = True
            live.verify()
        self.faults.remove()
        assert_closed(self.engine) if self.plan.abrupt else assert_nothing_held(self.engine)
        return self.seen + engine_counts(self.engine)

    def _add_some(self) -> None:
        while len(self.live) < MAX_LIVE and self.rng.random() < 0.5:
            if self.rng.random() < 0.05:
                self._add_bad()
            elif self._unfinished() and self.rng.random() < 0.02:
                self._add_with_id_in_use()
            else:
                self._add()
                for _ in range(self.rng.choice([0] * 15 + [MAX_LIVE])):  # a flood
                    self._add()

    def _add(self) -> None:
        case = self.book.case(self.rng)
        more: dict[str, Any] = {"namespace": self.rng.choice([None, None, None, "tenant", 7])}
        more["priority"] = self.rng.choice([0, 0, 0, 1, -1])
        pages = self.engine.kv  # of layers in groups, windows give pages back on the way
        most = self.plan.settings["num_pages"] - 1 if pages.frames is None else pages.max_request_pages
        if case.num_pages(self.plan.settings["page_size"]) > most:
            with pytest.raises(UnsupportedError, match="can never fit"):
                self.engine.add_request(case.prompt, case.params, **more)
            self.seen["refused: too large"] += 1
            return
        request = self.engine.add_request(case.prompt, case.params, **more)
        self.live[request.id] = Live(case, request)

    def _add_bad(self) -> None:
        prompt, settings = self.rng.choice(BAD)
        with pytest.raises((ValueError, TypeError)):
            self.engine.add_request(prompt, SamplingParams(**settings))
        with pytest.raises(TypeError):
            self.engine.add_request([1, 2], namespace=["does not hash"])
        self.seen["refused: bad"] += 1

    def _add_with_id_in_use(self) -> None:
        with pytest.raises(ValueError, match="in use"):
            self.engine.add_request([1, 2], request_id=self.rng.choice(self._unfinished()))
        self.seen["refused: id in use"] += 1

    def _unfinished(self) -> list[str]:
        """After a failed step some have ended whose last event comes with the next."""
        return [i for i, live in self.live.items() if live.request.finish_reason is None]

    def _disturb(self) -> None:
        if self.live and self.rng.random() < 0.06:
            running = self._unfinished()
            for request_id in self.rng.sample(running, min(len(running), self.rng.choice([1, 1, 1, 4]))):
                self.live[request_id].cut = True
                assert self.engine.cancel(request_id)
                assert not self.engine.cancel(request_id)
                self.seen["cancelled"] += 1
        if self.rng.random() < 0.03:
            self.faults.arm()

    def _step(self) -> int:
        before = self.faults.injected
        try:
            events = self.engine.step()
        except Injected:
            assert self.faults.injected == before + 1
            self.seen["failed steps"] += 1
            return 1  # events that were due come with the next step
        for event in events:
            self.live[event.request_id].take(event)
        for request_id in [i for i, live in self.live.items() if live.request.finish_reason is not None]:
            live = self.live.pop(request_id)
            live.verify()
            self.seen["requests"] += 1
            self.seen[f"ended: {live.request.finish_reason}"] += 1
            self.seen["sampled"] += not live.case.params.is_greedy
        return len(events)


def engine_counts(engine: Engine) -> Counter[str]:
    stats = engine.stats
    return Counter(
        {
            "steps": stats.steps, "new tokens": stats.new_tokens, "prompt tokens": stats.prompt_tokens,
            "cached tokens": stats.cached_tokens, "preemptions": engine.scheduler.stats.preemptions,
        }
    )  # fmt: skip


def drive(plan: Plan) -> Counter[str]:
    """Everything in it follows from the plan, what requests without a seed draw included."""
    entropy = plan.rng("entropy")
    with mock.patch.object(sampling_state, "fresh_seed", lambda: entropy.getrandbits(64)):
        return EngineRound(plan).run()
