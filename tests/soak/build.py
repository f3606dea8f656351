"""The engine of a round, its faults, and what must be true of it when the round is over."""

from __future__ import annotations

import contextlib
import functools
import random
from typing import Any
from unittest import mock

from transformers import PreTrainedModel

from paged_attn import LLM, EngineConfig
from paged_attn.engine import llm as llm_module
from paged_attn.engine.engine import Engine
from paged_attn.engine.sampling.sampler_output import SamplerOutput
from tests.capture.tape import TapeRecorder
from tests.engine.models import assert_idle, one_capture, tiny
from tests.engine.steps.test_captured_steps import fixed_backend
from tests.recurrent_models import recurrent
from tests.server.serving import chat_tokenizer
from tests.soak.cases import Book
from tests.soak.plan import RECURRENT, Plan


class Injected(RuntimeError):
    """A step failed because the soak wanted it to."""


def model_of(plan: Plan) -> PreTrainedModel:
    return _model(plan.model)


def book_of(plan: Plan) -> Book:
    """Made before any token is poisoned."""
    return _book(plan.model, f"{plan.seed}/{plan.number}", plan.with_nan)


def _model(name: str) -> PreTrainedModel:
    return recurrent(name) if name in RECURRENT else tiny(name)


@functools.lru_cache(2)
def _book(model: str, seed: str, with_nan: bool) -> Book:
    return Book(_model(model), random.Random(f"{seed}/book"), with_nan)


def make_llm(plan: Plan) -> LLM:
    recorder = TapeRecorder() if plan.captured else None
    shared = plan.settings["compile"] and not plan.own_capture
    with (
        fixed_backend() if plan.captured else contextlib.nullcontext(),
        one_capture() if shared else contextlib.nullcontext(),
        mock.patch.object(llm_module, "Engine", functools.partial(Engine, recorder=recorder)),
    ):
        return LLM(model_of(plan), tokenizer=chat_tokenizer(), config=EngineConfig(**plan.settings))


class Faults:
    """Lets steps of an engine fail: where they are laid out, before the model runs, after it, when tokens are chosen, and when they are
    waited for.

    `arm` fails the next step; with `rate` each step fails with that probability. `spare` tells of steps that must not fail.
    """

    WHERE = ("prepare", "run", "run, late", "choose", "wait")

    def __init__(self, engine: Engine, rng: random.Random, rate: float = 0.0) -> None:
        self.engine, self.rng, self.rate = engine, rng, rate
        self.injected = 0
        self._armed: str | None = None
        self._prepare, self._run, self._choose = engine.step_runner.prepare, engine.step_runner.run, engine.sampler.choose
        engine.step_runner.prepare = self._preparing  # type: ignore[method-assign]
        engine.step_runner.run = self._running  # type: ignore[method-assign]
        engine.sampler.choose = self._choosing  # type: ignore[method-assign]

    def arm(self) -> None:
        self._armed = self.rng.choice(self.WHERE)

    def spare(self) -> bool:
        return False

    def remove(self) -> None:
        self.engine.step_runner.prepare, self.engine.step_runner.run = self._prepare, self._run  # type: ignore[method-assign]
        self.engine.sampler.choose = self._choose  # type: ignore[method-assign]

    def _preparing(self, *args: Any) -> Any:
        if self.rate and self.rng.random() < self.rate and not self.spare():
            self.arm()
        self._fail_if("prepare")
        return self._prepare(*args)

    def _running(self, *args: Any) -> Any:
        self._fail_if("run")
        output = self._run(*args)
        self._fail_if("run, late")
        return output

    def _choosing(self, *args: Any) -> SamplerOutput:
        self._fail_if("choose")
        chosen = self._choose(*args)
        wait = chosen.wait

        def waiting() -> Any:
            self._fail_if("wait")
            return wait()

        chosen.wait = waiting  # type: ignore[method-assign]
        return chosen

    def _fail_if(self, where: str) -> None:
        if self._armed == where:
            self._armed = None
            self.injected += 1
            raise Injected(f"soak: {where}")


def assert_nothing_held(engine: Engine) -> None:
    """After a round, before and after `close`: no page, lock, slot, snapshot or graph."""
    assert_idle(engine)
    engine.close()
    assert_closed(engine)


def assert_closed(engine: Engine) -> None:
    assert not engine.requests and not engine.scheduler.running and not engine.scheduler.waiting
    assert engine.kv.allocator.num_free == engine.kv.num_usable, "pages are held after close()"
    assert engine.kv.tree is None or engine.kv.tree.num_pages == 0
    slots = engine.kv.states.allocator
    assert slots is None or not slots._held, f"slots {slots._held} are held after close()"
    if (graphs := engine.step_runner.graphs) is not None:
        assert not graphs.captured and not graphs.recorder.tapes, "graphs are left after close()"  # type: ignore[attr-defined]
