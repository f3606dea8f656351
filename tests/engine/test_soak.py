"""Short rounds of the soak (`python -m tests.soak` runs them for an hour), and proof that its checks see what they are there to see."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from paged_attn import SamplingParams
from paged_attn.engine.engine import Engine
from paged_attn.engine.requests.outputs import TokenEvent
from tests.soak import __main__ as script
from tests.soak import build, drive_engine, leaks, oracle, run
from tests.soak.build import Faults
from tests.soak.cases import Case, Outcome
from tests.soak.plan import ORDER, Plan
from tests.soak.run import DRIVERS, Soak
from tests.tiny_models import VOCAB

SMALL: dict[str, Any] = {
    "page_size": 4, "num_pages": 26, "max_batch_tokens": 16, "max_requests": 6, "prefix_cache": True, "compile": True, "graphs": "off",
}  # fmt: skip
PLAN = Plan(seed=1, number=0, kind="engine", model="qwen3", settings=SMALL, captured=False, own_capture=False, turns=150, abrupt=False)


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest keeps what is logged, and with a failed step its frames, and so the engine."""
    monkeypatch.setattr(logging.getLogger("paged_attn"), "level", logging.CRITICAL + 1)
    logging.getLogger("paged_attn").manager._clear_cache()  # type: ignore[attr-defined]


def with_settings(plan: Plan = PLAN, **settings: Any) -> Plan:
    return replace(plan, settings={**plan.settings, **settings})


GRAPHS = {"graphs": "auto", "graph_decode_sizes": 2, "graph_extend_sizes": 2}
ENGINES = {
    "few pages": PLAN,
    "overlap": with_settings(overlap=True, policy="lpm"),
    "graphs": with_settings(replace(PLAN, captured=True), num_pages=8, page_size=16, overlap=True, **GRAPHS),
    "hooks": with_settings(compile=False, overlap=True),
    "recurrent": with_settings(replace(PLAN, model="lfm2"), num_pages=60, overlap=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_keeps_its_promises(name: str) -> None:
    soak = Soak()
    assert soak.run(ENGINES[name])
    wanted = ("requests", "cancelled", "failed steps", "ended: error", "ended: stop", "ended: length", "refused: bad", "preemptions")
    assert not [what for what in wanted if not soak.seen[what]], f"something never happened: {soak.seen}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "server"])
@pytest.mark.parametrize("abrupt", [False, True])
def test_so_do_threads_and_the_server(kind: str, abrupt: bool) -> None:
    soak = Soak()
    assert soak.run(with_settings(replace(PLAN, kind=kind, turns=40, abrupt=abrupt), overlap=True))
    calls = {what for what in soak.seen if what.startswith("calls")}
    assert len(calls) > 3 or abrupt, f"too little happened: {soak.seen}"


def test_a_round_can_be_run_again() -> None:
    plan = with_settings(replace(PLAN, turns=80), overlap=True)
    assert DRIVERS["engine"](plan) == DRIVERS["engine"](plan)
    for number in range(len(ORDER)):
        assert Plan.of(5, number) == Plan.of(5, number) != Plan.of(6, number)
    other = Plan.of(5, 0, "server")
    assert other.replay.endswith("--seed 5 --round 0 --kind server") and Plan.of(5, 0).replay.endswith("--seed 5 --round 0")


def test_the_oracle_stops_before_a_tie_and_only_there() -> None:
    """`generate` alone and a batch may round it in different ways."""
    clear = torch.linspace(-1.0, 1.0, VOCAB)
    tied = clear.clone()
    tied[7] = clear.max() + 1e-6
    for length in range(1, 60):  # each with other noise
        for scores, firm in ((clear, None), (tied, 0)):
            chooser = oracle.Chooser([1] * length, SamplingParams())
            chooser(torch.ones(1, length, dtype=torch.int64), scores.unsqueeze(0))
            assert chooser.firm == firm


def leak_a_page(engine: Engine) -> None:
    engine.kv.allocator.allocate(1)


def leak_a_lock(engine: Engine) -> None:
    tree, calls = engine.kv.tree, iter(range(10**9))
    assert tree is not None
    unlock = tree.unlock
    tree.unlock = lambda node: unlock(node) if next(calls) % 50 else None  # type: ignore[method-assign]


def lose_an_event(engine: Engine) -> None:
    step = engine.step
    calls = iter(range(10**9))
    engine.step = lambda: [event for event in step() if next(calls) != 40]  # type: ignore[method-assign]


def tell_an_event_twice(engine: Engine) -> None:
    step = engine.step
    engine.step = lambda: [event for event in step() for _ in range(1 + (event.finish_reason == "stop"))]  # type: ignore[method-assign]


def say_another_token(engine: Engine) -> None:
    accept, calls = engine.output_processor.append_token, iter(range(10**9))

    def accepting(request: Any, token: Any) -> TokenEvent:
        return accept(request, token._replace(token_id=token.token_id % 90 + 1) if next(calls) == 30 else token)

    engine.output_processor.append_token = accepting  # type: ignore[method-assign]


def forget_to_stop(engine: Engine) -> None:
    add = engine.add_request

    def adding(*args: Any, **settings: Any) -> Any:
        request = add(*args, **settings)
        request.stop_token_ids = frozenset()
        return request

    engine.add_request = adding  # type: ignore[method-assign]


def leave_a_thread(_: Engine) -> None:
    released = threading.Event()
    KEPT.append(released)
    threading.Thread(target=released.wait, args=(20,), daemon=True, name="left behind").start()


def keep_an_engine(engine: Engine) -> None:
    KEPT.append(engine)


def share_what_was_not_vouched_for(engine: Engine) -> None:
    share = engine.kv._share_pages

    def sharing(request: Any) -> None:
        request.num_validated = request.num_cached
        share(request)

    engine.kv._share_pages = sharing  # type: ignore[method-assign]
    remove = engine.scheduler.remove
    engine.scheduler.remove = lambda request, *, share: remove(request, share=True)  # type: ignore[method-assign]


KEPT: list[Any] = []
BROKEN = [replace(PLAN, turns=800, seed=seed) for seed in range(1, 9)]  # one round may miss what another sees
SABOTAGE = {
    leak_a_page: "page|num_free",
    leak_a_lock: "locked_pages|nothing to schedule",
    lose_an_event: "events",
    tell_an_event_twice: "after the end|KeyError",
    say_another_token: "wrong tokens",
    forget_to_stop: "wrong",
    leave_a_thread: "threads before",
    keep_an_engine: "1 of Engine",
    share_what_was_not_vouched_for: "wrong|num_free",
}


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", SABOTAGE, ids=lambda each: each.__name__)
def test_what_goes_wrong_is_found_and_can_be_replayed(
    sabotage: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Faults.__init__

    def sabotaged(self: Faults, engine: Engine, *args: Any) -> None:
        made(self, engine, *args)
        sabotage(engine)

    monkeypatch.setattr(build.Faults, "__init__", sabotaged)
    soak = Soak()
    try:
        seen = next((plan for plan in BROKEN if not soak.run(with_settings(plan, overlap=sabotage is not forget_to_stop))), None)
    finally:
        for kept in KEPT:
            kept.set() if isinstance(kept, threading.Event) else None
        KEPT.clear()
    assert seen is not None, f"nobody saw: {sabotage.__name__}"
    printed = capsys.readouterr().out
    assert any(part in printed for part in SABOTAGE[sabotage].split("|")), printed
    assert f"replay: {seen.replay}" in printed and seen.replay in soak.report()


def test_files_children_and_memory_are_watched() -> None:
    with leaks.Watch(warm=True):
        pass
    with pytest.raises(AssertionError, match="files before"), leaks.Watch(warm=True):
        reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    with pytest.raises(AssertionError, match="child processes before"), leaks.Watch(warm=True):
        child = subprocess.Popen(["sleep", "20"])
    child.kill()
    child.wait()
    memory = leaks.Memory()
    memory.mib = [100.0] * leaks.WARM_ROUNDS + [100.0 + leaks.MAX_GROWTH_MIB] * 5
    memory.check()
    memory.mib += [101.0 + leaks.MAX_GROWTH_MIB] * 3
    with pytest.raises(AssertionError, match="memory grew by 49 MiB"):
        memory.check()
    memory.traces = 1
    memory.check()


def test_only_later_rounds_that_trace_may_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "gc", types.SimpleNamespace(collect=lambda: 0))  # 27 times it would take a minute after other tests
    memory = leaks.Memory()
    for number in range(leaks.WARM_ROUNDS + 3):
        memory.note(traced=number % 2 == 0)
    assert memory.traces == sum(number % 2 == 0 for number in range(leaks.WARM_ROUNDS, leaks.WARM_ROUNDS + 3)) > 0


def test_an_outcome_that_is_not_the_expected_one_is_refused() -> None:
    good = Outcome([5, 6, 7], "$%&", "length", None, [-1.0, -2.0, -3.0])
    case = Case([1, 2], drive_engine.SamplingParams(max_new_tokens=3, logprobs=0), good)
    case.check(good)
    case.check(replace(good, tokens=[5], text="$", reason="cancelled", logprobs=[-1.0]), cut=True)
    for wrong in (
        {"tokens": [5, 6]}, {"tokens": [5, 6, 8]}, {"text": "$%"}, {"reason": "stop"}, {"stop_reason": 7}, {"logprobs": [-1.0, -2.0, -3.1]},
        {"logprobs": [-1.0]},
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="wrong"):
            case.check(replace(good, **wrong))
    with pytest.raises(AssertionError, match="wrong tokens before the end"):
        case.check(replace(good, tokens=[6], text="%", reason="cancelled", logprobs=None), cut=True)
    with pytest.raises(AssertionError, match="NaN was not reported"):
        replace(case, nan=True).check(good)


def clock(minutes: Iterator[int]) -> types.SimpleNamespace:
    """The script's alone: the `time` module's own clock belongs to every event loop in the process."""
    return types.SimpleNamespace(monotonic=lambda: 60.0 * next(minutes))


@pytest.mark.parametrize("number_that_fails", [None, 2])
def test_the_script_says_what_it_covered_and_what_failed(
    number_that_fails: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def drive(plan: Plan) -> Counter[str]:
        assert plan.number != number_that_fails, "this one fails"
        return Counter({"requests": plan.turns})

    rounds = itertools.count()
    monkeypatch.setattr(run, "DRIVERS", {"engine": drive})
    monkeypatch.setattr(run.Memory, "note", lambda *_: 0.0)
    monkeypatch.setattr(run.Memory, "check", lambda _: next(rounds))
    monkeypatch.setattr(script, "time", clock(rounds))
    monkeypatch.setattr(sys, "argv", ["soak", "--seed", "3", "--minutes", "8", "--kind", "engine", "--turns", "7"])
    assert script.main() == (number_that_fails is not None)
    printed = capsys.readouterr().out
    assert "seed 3" in printed and "per minute" in printed and "requests" in printed
    assert ("replay: OMP_NUM_THREADS=1 python -m tests.soak --seed 3 --round 2 --turns 7" in printed) == bool(number_that_fails)


def test_the_script_fails_if_something_never_happened(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    minutes = itertools.count()
    seen = Counter(script.WANTED)
    monkeypatch.setattr(run, "DRIVERS", dict.fromkeys(("engine", "threads", "server"), lambda _: seen))
    monkeypatch.setattr(run.Memory, "note", lambda *_: 0.0)
    monkeypatch.setattr(run, "Watch", lambda warm: contextlib.nullcontext())
    monkeypatch.setattr(script, "time", clock(minutes))
    monkeypatch.setattr(sys, "argv", ["soak", "--seed", "3", "--minutes", "60"])
    assert script.main() == 0
    del seen["preemptions"]
    assert script.main() == 1
    assert "never seen: preemptions;" in capsys.readouterr().out
