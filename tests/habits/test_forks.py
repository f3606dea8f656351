"""Forks of a process that has an engine, as multiprocessing makes them: they get an answer or an error, and do it no harm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import pytest

from paged_attn import AsyncLLM, SamplingParams
from paged_attn.asynchronous.errors import NotServingError
from paged_attn.engine.sampling.structured.guides import Guides, allowed_next
from tests.engine.models import make_llm, one_capture, tiny, tokenizer

T = TypeVar("T")
SECONDS = 20.0
GUIDES: list[Guides] = []
LLMS: list[AsyncLLM] = []


def in_a_fork(function: Callable[[], T]) -> T:
    """What it returns or raises there; a fork that hangs is ended."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("fork"))
    try:
        return pool.submit(function).result(timeout=SECONDS)
    finally:
        for process in pool._processes.values():
            process.kill()
        pool.shutdown()


def can_begin(regex: str) -> bool:
    """Whether some token may begin an answer."""
    guides = [guide for _ in range(4) if (guide := GUIDES[-1].guide(SamplingParams(regex=regex))) is not None]
    return bool(allowed_next(guides).any())


def of_child() -> list[bool]:
    found = [can_begin("[ab]{2}"), can_begin("[cd]{3}")]
    GUIDES[-1].close()
    return found


def test_a_fork_reads_guides_for_itself() -> None:
    """The threads that work out masks stay in the first process, and so does the process that reads: it listens to one alone."""
    GUIDES.append(make_llm(tokenizer=tokenizer()).engine.input_processor.guides)
    assert can_begin("[ab]{2}")
    trials = GUIDES[-1]._trials
    assert trials is not None
    reader = trials._process
    assert in_a_fork(of_child) == [True, True]
    assert can_begin("[ef]{4}") and trials._process is reader
    GUIDES[-1].close()


def generate() -> None:
    asyncio.run(LLMS[-1].generate([4, 5]))


def test_a_fork_is_told_that_the_engines_thread_is_elsewhere() -> None:
    with one_capture():
        LLMS.append(AsyncLLM(tiny(), page_size=4, num_pages=16))
    try:
        with pytest.raises(NotServingError, match="made in another process, of which this one is a fork"):
            in_a_fork(generate)
    finally:
        assert LLMS[-1].stop(SECONDS)
