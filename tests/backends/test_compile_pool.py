"""Processes that compile: begun before there is a job, kept for the next, and gone after a while."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("triton")
from triton.runtime import driver

from paged_attn.backends.compiling import compile_job, compile_pool
from paged_attn.backends.compiling.compile_job import Job
from paged_attn.backends.compiling.compile_pool import Jobs, Workers


class Written:
    """A job that any process can do."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error

    def compile(self) -> None:
        if self.error is not None:
            raise ValueError(self.error)


def jobs(*errors: str | None) -> Jobs:
    return [(pickle.dumps(Written(error)), Future()) for error in errors]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that were made; two at a time."""
    made: list[Any] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(compile_pool.subprocess, "Popen", Noted)
    monkeypatch.setattr(compile_pool, "WORKERS", 2)
    return made


def ended(processes: list[Any]) -> list[int]:
    """How each ended, once all did."""
    return [process.wait(60) for process in processes]


def test_they_wait_for_jobs_and_end_when_none_come(begun: list[Any]) -> None:
    workers = Workers(idle_seconds=1.0)
    workers.start()
    workers.start()
    for _ in range(2):
        asked = jobs(None, None, None)
        workers.compile(asked)
        assert [future.result(60) for _, future in asked] == [None] * 3
    assert len(begun) == 2 and ended(begun) == [0, 0]
    asked = jobs(None)
    workers.compile(asked)
    assert asked[0][1].result(60) is None and len(begun) > 2 and set(ended(begun)) == {0}


def test_a_job_that_fails_tells_why_and_takes_no_other_with_it(begun: list[Any]) -> None:
    workers = Workers(idle_seconds=0.2)
    asked = jobs(None, "too many registers", None, None)
    workers.compile(asked)
    with pytest.raises(RuntimeError, match="too many registers"):
        asked[1][1].result(60)
    assert [future.result(60) for _, future in (asked[0], *asked[2:])] == [None] * 3 and 0 in ended(begun)


def test_ctrl_c_in_a_terminal_ends_none_of_them(begun: list[Any]) -> None:
    """It reaches all processes there, and the engine's may answer it and go on."""
    workers = Workers(idle_seconds=0.5)
    for _ in range(2):
        asked = jobs(None, None)
        workers.compile(asked)
        assert [future.result(60) for _, future in asked] == [None] * 2
        for process in begun:
            process.send_signal(signal.SIGINT)
    assert len(begun) == 2 and ended(begun) == [0, 0]


def test_no_processes_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "COMMAND", ("/nowhere/python",))
    asked = jobs(None, None)
    Workers(idle_seconds=0.2).compile(asked)
    assert all(isinstance(future.exception(60), OSError) for _, future in asked)


def test_what_is_not_urgent_has_the_lowest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[tuple[int, int, int]]()
    monkeypatch.setattr(compile_job.os, "setpriority", lambda *given: said.append(given))
    monkeypatch.setattr(driver, "set_active", lambda _: None)
    for urgent in (True, False):
        with pytest.raises(ModuleNotFoundError):
            Job("no_such_module", "kernel", None, (1,), (), {}, urgent=urgent).compile()
    assert said == [(os.PRIO_PROCESS, 0, 19)]
