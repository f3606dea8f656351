"""One LLM under several threads: batches, streams read, held and dropped, prompts that are refused, NaN, steps that fail."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from paged_attn import LLM, Completion
from paged_attn.engine.requests.outputs import TokenEvent
from tests.engine.models import assert_idle, poisoned
from tests.soak.build import Faults, Injected, assert_closed, assert_nothing_held, book_of, make_llm, model_of
from tests.soak.cases import BAD, Book, Case, Outcome
from tests.soak.drive_engine import engine_counts
from tests.soak.plan import Plan

JOIN_SECONDS = 120.0
FAULT_RATE = 0.02
NAN_ERROR = "NaN or infinite logits"


class Caller:
    """One thread's calls; its random numbers are its own."""

    def __init__(self, llm: LLM, book: Book, plan: Plan, name: str, calls: int) -> None:
        self.llm, self.book, self.plan, self.calls = llm, book, plan, calls
        self.rng, self.seen = plan.rng(name), Counter[str]()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=name)

    def _run(self) -> None:
        try:
            for _ in range(self.calls):
                call = self.rng.choice([self._generate, self._generate, self._stream, self._stream, self._drop, self._refused])
                call()
                self.seen[f"calls: {call.__name__[1:]}"] += 1
        except BaseException as error:  # noqa: BLE001 - raised again by `drive`
            self.error = error

    def _cases(self) -> list[Case]:
        room = self.plan.settings["num_pages"] - 1
        cases = [self.book.case(self.rng) for _ in range(self.rng.choice([1, 1, 2, 4]))]
        return [case for case in cases if case.num_pages(self.plan.settings["page_size"]) <= room] or self._cases()

    def _generate(self) -> None:
        cases = self._cases()
        try:
            got = self.llm.generate([c.prompt for c in cases], [c.params for c in cases], namespace=self._namespace())
        except (Injected, ValueError) as error:
            self._expect(error, cases)
            return
        cut = [completion.finish_reason == "cancelled" for completion in got]
        assert not any(case.nan and not cut[i] for i, case in enumerate(cases)), "a prompt with NaN gave a completion"
        for case, completion in zip(cases, got, strict=True):
            self._check(case, completion)

    def _stream(self, most: int | None = None) -> None:
        """Read a stream, all of it or so many events; now and then something else is done in the middle."""
        cases = self._cases()
        stream = self.llm.stream([c.prompt for c in cases], [c.params for c in cases], namespace=self._namespace())
        events: list[list[TokenEvent]] = [[] for _ in cases]
        try:
            for number, event in enumerate(stream):
                assert not events[event.index] or events[event.index][-1].finish_reason is None, f"an event after the end: {event}"
                events[event.index].append(event)
                if number == most:
                    break
                if self.rng.random() < 0.01:
                    self._generate()
            else:
                most = None
            error: Exception | None = None
        except (Injected, ValueError) as raised:
            error = raised
            self._expect(error, cases)
        if most is not None or self.rng.random() < 0.3:
            self._close(stream)
        for case, mine in zip(cases, events, strict=True):
            self._check_events(case, mine, whole=most is None and error is None)

    def _drop(self) -> None:
        self._stream(self.rng.randrange(12))

    def _close(self, stream: Iterator[TokenEvent]) -> None:
        """Here or in another thread."""
        if self.rng.random() < 0.8:
            stream.close()  # type: ignore[attr-defined]
        else:
            closer = threading.Thread(target=stream.close)  # type: ignore[attr-defined]
            closer.start()
            closer.join(JOIN_SECONDS)
        assert list(stream) == []

    def _refused(self) -> None:
        """A bad prompt among good ones: none of them is queued."""
        cases = self._cases()
        bad, _ = self.rng.choice([(prompt, settings) for prompt, settings in BAD if not settings])
        prompts: list[Any] = [c.prompt for c in cases]
        prompts.insert(self.rng.randint(0, len(prompts)), bad)
        with pytest.raises((ValueError, TypeError)):
            self.rng.choice([self.llm.generate, self.llm.stream])(prompts, namespace=self._namespace())

    def _namespace(self) -> Any:
        return self.rng.choice([None, None, None, "tenant"])

    def _expect(self, error: Exception, cases: list[Case]) -> None:
        nan = NAN_ERROR in str(error) and any(case.nan for case in cases)
        if not nan and not isinstance(error, Injected):
            raise error
        self.seen["calls that failed: NaN" if nan else "calls that failed: step"] += 1

    def _check(self, case: Case, completion: Completion) -> None:
        known = None
        if completion.logprobs is not None:
            known = [best[token] for best, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        reason = completion.finish_reason
        outcome = Outcome(completion.token_ids, completion.text, reason, completion.stop_reason, known)
        case.check(outcome, cut=self.plan.abrupt and reason == "cancelled")
        self.seen["requests"] += 1
        self.seen[f"ended: {reason}"] += 1

    def _check_events(self, case: Case, events: list[TokenEvent], whole: bool) -> None:
        reason = events[-1].finish_reason if events else None
        if case.nan:
            assert reason in (None, "error", "cancelled") and all(e.token_id is None for e in events), f"tokens from NaN: {events}"
            return
        assert not whole or reason is not None or self.plan.abrupt, f"the stream ended, but not the request: {events}"
        tokens = [e.token_id for e in events if e.token_id is not None]
        known = [e.logprob for e in events if e.logprob is not None] if case.params.logprobs is not None else None
        stop_reason = case.expected.stop_reason if reason == "stop" else None  # events do not tell
        ended = reason in ("stop", "length")
        case.check(Outcome(tokens, "".join(e.text for e in events), reason, stop_reason, known), cut=not ended)
        if ended:
            self.seen["requests"] += 1
            self.seen[f"ended: {reason}"] += 1


def drive(plan: Plan) -> Counter[str]:
    book = book_of(plan)
    llm = make_llm(plan)
    faults = Faults(llm.engine, plan.rng("faults"), FAULT_RATE)
    number = plan.rng("threads").choice([2, 4, 8])
    callers = [Caller(llm, book, plan, f"caller-{i}", plan.turns // number) for i in range(number)]
    with poisoned(model_of(plan)):
        for caller in callers:
            caller.thread.start()
        if plan.abrupt and plan.settings["compile"]:  # else close() gives the model back, and that was it
            close_now_and_then(llm, plan.rng("close"), callers)
        for caller in callers:
            caller.thread.join(JOIN_SECONDS)
            assert not caller.thread.is_alive(), f"{caller.thread.name} is stuck"
    for caller in callers:
        if caller.error is not None:
            raise caller.error
    faults.remove()
    assert not llm._inboxes, f"inboxes are left: {list(llm._inboxes)}"
    if plan.abrupt:
        assert_idle(llm.engine)
        llm.close()
        assert_closed(llm.engine)
    else:
        assert_nothing_held(llm.engine)
    total = sum((caller.seen for caller in callers), Counter[str]())
    return total + engine_counts(llm.engine) + Counter({"failed steps": faults.injected})


def close_now_and_then(llm: LLM, rng: random.Random, callers: list[Caller]) -> None:
    """`Engine.close` cancels what runs; whoever comes later is served without graphs. (`LLM.close` is the last thing that it is asked.)"""
    while any(caller.thread.is_alive() for caller in callers):
        callers[0].thread.join(rng.uniform(0.05, 0.5))
        with llm._lock:
            llm.engine.close()
