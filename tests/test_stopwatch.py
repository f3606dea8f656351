"""Seconds by part: each once, for the innermost part that was open."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from paged_attn import LLM, stopwatch
from paged_attn.stopwatch import part
from tests.tiny_models import build


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    yield now


def test_a_part_counts_without_those_inside_it(clock: list[float]) -> None:
    @part("trace")
    def trace() -> None:
        clock[0] += 4
        with part("prove"):
            clock[0] += 2
        clock[0] += 1

    with stopwatch.stopwatch() as seconds:
        clock[0] += 8
        trace()
        clock[0] += 16
        with pytest.raises(ValueError, match="inside"), part("trace"):
            clock[0] += 32
            raise ValueError("inside")
    clock[0] += 64
    trace()  # nobody counts
    assert seconds == {"other": 24, "trace": 37, "prove": 2}


def test_another_thread_is_not_counted(clock: list[float]) -> None:
    def other() -> None:
        with part("elsewhere"):
            clock[0] += 3

    with stopwatch.stopwatch() as seconds:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seconds == {"other": 3}


def test_an_engine_says_where_its_start_went() -> None:
    with LLM(build("llama"), num_pages=16) as llm:
        found = llm.engine.start_seconds
    assert (
        {"read a kept graph", "self-check", "graphs and pool"} <= found.keys()
        and found["self-check"] > 0
        and found["graphs and pool"] > 1e-4
    )
