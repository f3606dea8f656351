"""Ctrl-C in the middle of bookkeeping, where Python raises KeyboardInterrupt between any two lines: no page is lost, no lock stays."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.engine.engine import Engine
from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.memory.radix_cache import RadixCache
from paged_attn.engine.output_processor import OutputProcessor
from paged_attn.engine.scheduling.running_set import RunningSet
from paged_attn.engine.scheduling.scheduler import Scheduler
from paged_attn.engine.scheduling.waiting_queue import WaitingQueue
from paged_attn.interrupts import PATIENCE, held_back
from tests.engine.models import assert_idle, assert_nothing_left, make_llm, oracle, random_prompts, tokenizer

PROMPTS = random_prompts(0, 6, 19, 11)
GREEDY = SamplingParams(max_new_tokens=8)
PLACES = [
    (PageAllocator, "allocate"), (PageAllocator, "free"), (RadixCache, "lock"), (RadixCache, "unlock"), (RadixCache, "extend"),
    (KVManager, "release"), (KVManager, "adopt_prefix"), (OutputProcessor, "add_request"), (OutputProcessor, "_finish"),
    (Scheduler, "_start"), (RunningSet, "add"), (RunningSet, "remove"), (WaitingQueue, "take"), (LLM, "_hand_out"), (LLM, "_queue"),
    (Engine, "_launch"), (Engine, "take_due_events"),
]  # fmt: skip


def interrupted_after(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at_call: int = 2) -> None:
    """A SIGINT comes when the function has done its part for the `at_call`-th time, before its caller goes on."""
    function, calls = getattr(owner, name), iter(range(1, 10**9))

    def interrupting(*args: Any, **given: Any) -> Any:
        result = function(*args, **given)
        if next(calls) == at_call:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, name, interrupting)


def generate(llm: LLM) -> None:
    llm.generate(PROMPTS, GREEDY)


def stream(llm: LLM) -> None:
    for _ in llm.stream(PROMPTS, GREEDY):
        pass


@pytest.mark.parametrize("call", [generate, stream], ids=lambda call: call.__name__)
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[f"{owner.__name__}.{name}" for owner, name in PLACES])
def test_an_interrupt_loses_nothing(monkeypatch: pytest.MonkeyPatch, call: Callable[[LLM], None], owner: type, name: str) -> None:
    llm = make_llm(max_batch_tokens=8, num_pages=16, tokenizer=tokenizer())
    call(llm)  # so that prefixes are cached
    with monkeypatch.context() as patched:
        interrupted_after(patched, owner, name, at_call=1 if name == "_queue" else 2)
        with pytest.raises(KeyboardInterrupt):
            call(llm)
    assert not llm._inboxes and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_idle(llm.engine)
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [oracle(p, 8) for p in PROMPTS]
    assert_nothing_left(llm)


def test_who_steps_an_engine_goes_on_after_an_interrupt_without_losing_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_llm(max_batch_tokens=8).engine
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    events, interrupts = [], 0
    interrupted_after(monkeypatch, RadixCache, "lock", at_call=4)
    while engine.has_work:
        try:
            events += engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert [event.token_id for event in events if event.request_id == request.id] == oracle(prompt, 8)
    assert_idle(engine)


def test_the_model_is_interrupted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    run, went_on = llm.engine.step_runner.run, []

    def long(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)
        return run(*args)

    monkeypatch.setattr(llm.engine.step_runner, "run", long)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert not went_on
    assert_nothing_left(llm)


def test_a_second_interrupt_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0.0, PATIENCE / 2, 2 * PATIENCE))
    # Not time.monotonic itself: event loops of servers in other threads ask it, too.
    monkeypatch.setattr("paged_attn.interrupts.time", SimpleNamespace(monotonic=lambda: next(now)))
    reached = []
    with pytest.raises(KeyboardInterrupt), held_back:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the same key press, told twice
        reached.append(True)
        signal.raise_signal(signal.SIGINT)
        reached.append(False)
    assert reached == [True]


def test_a_handler_of_ours_that_somebody_puts_back_later_swallows_nothing() -> None:
    with held_back:
        theirs = signal.getsignal(signal.SIGINT)  # as a library notes it that sets its own
    try:
        signal.signal(signal.SIGINT, theirs)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), held_back:
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_handlers_and_other_threads_are_left_alone() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: told.append(number))
    try:
        with held_back:
            signal.raise_signal(signal.SIGINT)
            assert not told
            held_back.check()
            assert told == [signal.SIGINT]
        assert told == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with held_back:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    llm = make_llm()
    with held_back:
        thread = threading.Thread(target=generate, args=(llm,))
        thread.start()
        thread.join()
    assert_nothing_left(llm)
