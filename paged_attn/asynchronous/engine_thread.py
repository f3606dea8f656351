"""The one thread that touches the engine: requests and cancellations arrive through a queue, events go out to event loops."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from itertools import product
from typing import Any

from paged_attn.asynchronous.errors import (
    EngineDiedError,
    NotServingError,
    ServingError,
    Status,
    StepFailedError,
    closed_before_its_end,
    described,
    in_words,
)
from paged_attn.asynchronous.failed_steps import FailedSteps, hit_by_failed_step
from paged_attn.asynchronous.job import Accepted, Job, Update
from paged_attn.asynchronous.job_queue import JobQueue, WaitingJobs, made_room, waited_too_long
from paged_attn.asynchronous.snapshot import EndedRequest, EngineSnapshot, Observer
from paged_attn.engine.engine import Engine
from paged_attn.engine.requests.outputs import TokenEvent
from paged_attn.engine.requests.request import Request

logger = logging.getLogger("paged_attn")
ADDS_PER_TURN = 64  # so that a flood of new requests does not delay running ones


class EngineThread:
    """Creates an engine in its own thread, and steps it there.

    Args:
        make_engine: called on the thread; may take minutes.
        max_queue: prompts that may wait beyond those that can run (`JobQueue`).
        queue_seconds: how long a prompt may wait; None: no limit.

    A step that raises ends its requests with a StepFailedError; all others continue. After that, as soon as the engine is idle, a probe of
    one token must succeed, or the engine is considered dead; an engine that does not recover (`Engine.recovers`) is dead at once.
    `submit`, `cancel` and `drain` may be called from any thread.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], max_queue: int, observer: Observer | None = None, queue_seconds: float | None = None
    ) -> None:
        self.engine: Engine | None = None
        self._process = os.getpid()
        self.error: BaseException | None = None
        self.snapshot = EngineSnapshot()
        self.queue_seconds = queue_seconds
        self.raises_start_failure = False  # set if the caller tells the user why there is no engine
        self.status = Status.LOADING
        self._make_engine, self._observer = make_engine, observer or Observer()
        self._condition = threading.Condition()
        self._queue = JobQueue(max_queue)
        self._cancels: deque[Job] = deque()
        self._questions: deque[tuple[Callable[[Engine], Any], asyncio.Future[Any]]] = deque()
        self._everything: ServingError | None = None  # cancel all that there is, for this reason
        self._taken: list[Job] = []  # jobs taken in this turn that may not have reached the engine yet
        self._asked: list[tuple[Callable[[Engine], Any], asyncio.Future[Any]]] = []
        self._stopping = False
        self._failed_steps = FailedSteps()
        self._owners: dict[str, tuple[Job, int]] = {}  # by id of the engine's request
        self._started: dict[str, float] = {}  # those with a first token, and when their last one came
        self._waiting = WaitingJobs(lambda request: self.engine is not None and self.engine.scheduler.waiting.is_new(request))
        self._thread = threading.Thread(target=self._run, name="paged-attn-engine", daemon=True)

    def start(self) -> None:
        """Create the engine and run it; updates of jobs go to their event loops."""
        self._thread.start()

    def wait_until_made(self) -> None:
        """Wait until there is an engine; raises what creating it raised."""
        with self._condition:
            self._condition.wait_for(lambda: self.status is not Status.LOADING)
        if self.engine is None and self.error is not None:
            raise self.error
        self.refuse_unless_ready()

    def refuse_unless_ready(self) -> Engine:
        """The engine, to read what never changes. Raises NotServingError: with the reason why nothing is served."""
        if self._process != os.getpid():
            raise NotServingError(
                "this AsyncLLM was made in another process, of which this one is a fork, and its thread stayed there; make one in each "
                "process", "forked",
            )  # fmt: skip
        if self.status is Status.READY and self.engine is not None:
            return self.engine
        raise NotServingError(self.describe(), str(self.status), 5 if self.status is Status.LOADING else None)

    def describe(self) -> str:
        return described(self.status, self.error)

    def submit(self, job: Job) -> None:
        """Queue a job; its updates follow.

        Raises:
            NotServingError: the engine does not run.
            QueueFullError: too many wait.
            PromptError: so many prompts can never wait.
        """
        with self._condition:
            self._queue.add(job, self.refuse_unless_ready().config.max_requests, self.snapshot)
            self._condition.notify()

    def cancel(self, job: Job) -> None:
        """Stop a job, waiting or running; does nothing if it has ended."""
        with self._condition:
            job.cancelled = True
            self._cancels.append(job)
            self._condition.notify()

    async def ask(self, question: Callable[[Engine], Any]) -> Any:
        """What a function of the engine returns or raises; it runs on the engine's thread, between two steps. Raises NotServingError: the
        engine does not run."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._condition:
            self.refuse_unless_ready()
            self._questions.append((question, answer))
            self._condition.notify()
        return await answer

    def drain(self) -> None:
        """Accept no new jobs; accepted ones continue."""
        with self._condition:
            if self.status in (Status.LOADING, Status.READY):
                self.status = Status.DRAINING

    def cancel_all(self) -> None:
        """End all jobs with a NotServingError."""
        with self._condition:
            self._everything = closed_before_its_end()
            self._condition.notify()

    def stop(self, timeout: float | None = None) -> bool:
        """End all jobs, release the engine and end the thread; False if it still runs after `timeout` seconds."""
        self.drain()
        self.cancel_all()
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # What follows runs on the thread.

    def _run(self) -> None:
        try:
            engine = self._make_engine()
            with self._condition:
                self.engine = engine
                if self.status is Status.LOADING:
                    self.status = Status.READY
                    self._condition.notify_all()
            self._serve(engine)
        except BaseException as error:  # last resort: otherwise every client would wait forever
            if self.engine is not None or not self.raises_start_failure:
                logger.exception("the engine's thread ended")
            self._end(Status.DEAD, error)
        else:
            self._end(Status.STOPPED, None)
        if self.engine is not None:
            try:
                self.engine.release()
            finally:  # after a CUDA error the device may refuse to wait
                self._publish(self.engine)

    def _serve(self, engine: Engine) -> None:
        while True:
            with self._condition:
                while not (
                    self._queue or self._cancels or self._questions or self._everything or self._stopping
                    or engine.has_work or self._failed_steps.probe_due
                ):  # fmt: skip
                    self._condition.wait()
                cancels, self._cancels = list(self._cancels), deque()
                questions, self._questions = list(self._questions), deque()
                everything, self._everything = self._everything, None
                if everything is None:
                    adds = [] if self._failed_steps.hold_back else self._queue.take(ADDS_PER_TURN)
                else:
                    adds = self._queue.take()
                self._taken, self._asked = adds, questions
                stopping = self._stopping
            for job in cancels:
                self._drop(engine, job, "cancelled")
            for question, answer in questions:
                self._answer(engine, question, answer)
            if everything is None:
                self._send(update for job in adds if (update := self._admit(engine, job)) is not None)
            else:
                running = self._fail(engine, {job for job, _ in self._owners.values()}, everything, "cancelled")
                self._send([*running, *((job, everything) for job in adds)])
            self._taken, self._asked = [], []
            self._turn_away(engine)
            self._publish(engine, adds)
            if stopping:
                return
            if engine.has_work:
                self._step(engine)
                self._publish(engine, stepped=True)
            elif self._failed_steps.probe_due:
                self._end_lost(engine)
                self._failed_steps.probe(engine)  # an error here ends the thread

    def _answer(self, engine: Engine, question: Callable[[Engine], Any], answer: asyncio.Future[Any]) -> None:
        try:
            _settle(answer, answer.set_result, question(engine))
        except Exception as error:  # a refusal, or no memory for an adapter: the caller gets it, whatever happens to the engine
            _settle(answer, answer.set_exception, error)
            if not isinstance(error, (ValueError, TypeError)) and not engine.recovers:
                raise

    def _admit(self, engine: Engine, job: Job) -> tuple[Job, Update] | None:
        if job.cancelled:
            return None
        try:
            for prompt, params in product(job.prompts, job.answers):
                request = engine.add_request(
                    prompt.token_ids, prompt.params(params), namespace=job.namespace, tenant=job.tenant, prompt=prompt.text,
                    priority=job.priority, text_at_end=job.text_at_end, kept_tokens=prompt.kept_tokens, lora=job.lora,
                )  # fmt: skip
                self._owners[request.id] = (job, len(job.requests))
                job.requests.append(request)
        except (ValueError, TypeError) as error:  # UnsupportedError is a ValueError
            if len(job.prompts) > 1:
                error.add_note(f"(prompt {len(job.requests) // len(job.answers) + 1} of {len(job.prompts)})")
            self._drop(engine, job, None)
            return job, error
        self._waiting.add(job)
        return job, Accepted()

    def _turn_away(self, engine: Engine) -> None:
        """Refuse jobs that have waited too long, and those beyond the queue's limit."""
        if self.queue_seconds is not None:
            late = list(self._waiting.overdue(time.perf_counter(), self.queue_seconds))
            self._send(self._fail(engine, late, waited_too_long(self.queue_seconds), "queue_timeout"))
        scheduler = engine.scheduler
        with self._condition:
            excess = self._queue.take_excess(len(scheduler.running), len(scheduler.waiting), engine.config.max_requests)
        if excess > 0:  # preempted requests that wait again push nobody out
            surplus = list(self._waiting.surplus(excess, self._queue.max_queue, scheduler.waiting.count_of))
            self._send(self._fail(engine, surplus, made_room(), "turned_away"))

    def _drop(self, engine: Engine, job: Job, outcome: str | None) -> None:
        """Cancel the requests of a job that the engine still has; `outcome` is counted unless it is None."""
        self._waiting.discard(job)
        for request in job.requests:
            if self._owners.pop(request.id, None) is not None:
                self._started.pop(request.id, None)
                engine.cancel(request.id)
                if outcome is not None:
                    self._observer.ended(_ended(job, request, outcome, time.perf_counter()))

    def _fail(self, engine: Engine, jobs: Collection[Job], error: ServingError, outcome: str) -> list[tuple[Job, Update]]:
        for job in jobs:
            self._drop(engine, job, outcome)
        return [(job, error) for job in jobs]

    def _step(self, engine: Engine) -> None:
        started, steps = time.perf_counter(), engine.stats.steps
        try:
            events = engine.step()
        except Exception as error:  # whatever it is, the server reports it and goes on
            if not engine.recovers:
                raise
            logger.exception("a step of the engine failed")
            self._failed_steps.one_failed()
            self._observer.step_failed()
            self._send(self._fail(engine, hit_by_failed_step(engine, self._owners), _step_failed(in_words(error)), "error"))
            return
        self._failed_steps.one_worked()
        now = time.perf_counter()
        if engine.stats.steps > steps:  # otherwise it only waited for the previous one
            self._observer.step(now - started)
        gaps = Counter[float]()  # most tokens of a step have the same gap, so they are counted together
        self._send(update for event in events if (update := self._update_of(event, now, gaps)) is not None)
        for gap, count in gaps.items():
            self._observer.later_tokens(gap, count)
        self._end_lost(engine)

    def _end_lost(self, engine: Engine) -> None:
        """After a failed step, when all pending events have been delivered: report requests that ended without an event."""
        if self._failed_steps.events_due:
            self._failed_steps.events_due = False
            lost = {job for job, index in self._owners.values() if job.requests[index].finish_reason is not None}
            self._send(self._fail(engine, lost, _step_failed("its last token was lost"), "error"))

    def _update_of(self, event: TokenEvent, now: float, gaps: Counter[float]) -> tuple[Job, Update] | None:
        owner = self._owners.get(event.request_id)
        if owner is None:
            return None
        job, index = owner
        if event.token_id is not None:
            if (last := self._started.get(event.request_id)) is not None:
                gaps[now - last] += 1
            else:
                self._waiting.discard(job)
                self._observer.first_token(now - job.arrived)
                if job.first_token_at is None:
                    job.first_token_at = now
            self._started[event.request_id] = now
        if event.finish_reason is not None:
            del self._owners[event.request_id]
            self._started.pop(event.request_id, None)
            self._waiting.discard(job)
            self._observer.ended(_ended(job, job.requests[index], str(event.finish_reason), now))
        elif job.text_at_end:
            return None
        return job, (index, event)

    def _publish(self, engine: Engine, taken: Iterable[Job] = (), stepped: bool = False) -> None:
        snapshot = EngineSnapshot.of(engine)
        with self._condition:
            self.snapshot = snapshot
            self._queue.were_seen(taken)
            if stepped or not snapshot.waiting:  # who waited may have left, and then no step follows
                self._queue.blocked = snapshot.waiting > 0

    def _end(self, status: Status, error: BaseException | None) -> None:
        """Stop serving, and fail everything that waits."""
        with self._condition:
            self.status, self.error = status, error
            self._condition.notify_all()
            waiting = {*self._queue.clear(), *self._taken, *(job for job, _ in self._owners.values())}
            questions, self._questions = [*self._asked, *self._questions], deque()
            self._owners.clear()
        told = NotServingError(self.describe(), str(status)) if error is None else EngineDiedError(self.describe())
        self._send((job, told) for job in waiting)
        for _, answer in questions:
            _settle(answer, answer.set_exception, told)

    def _send(self, updates: Iterable[tuple[Job, Update]]) -> None:
        """Wake up each event loop once for all of its jobs."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Job, Update]]] = {}
        for job, update in updates:
            if job.loop is not None:
                by_loop.setdefault(job.loop, []).append((job, update))
        for loop, listed in by_loop.items():
            try:
                loop.call_soon_threadsafe(_dispatch, listed)
            except RuntimeError:  # the loop is closed: nobody is left to tell
                with self._condition:
                    self._cancels += [job for job, _ in listed]


def _ended(job: Job, request: Request, outcome: str, now: float) -> EndedRequest:
    queued = None if request.began_at is None else request.began_at - job.arrived
    return EndedRequest(outcome, now - job.arrived, queued, len(request.prompt_token_ids), request.num_sampled)


def _step_failed(why: str) -> StepFailedError:
    return StepFailedError(f"the step that ran this request failed: {why}")


def _settle(answer: asyncio.Future[Any], method: Callable[[Any], None], outcome: Any) -> None:
    """From any thread; an answer whose loop is closed is dropped. `method`: the answer's `set_result` or `set_exception`."""

    def settle() -> None:
        if not answer.done():  # the caller has not left
            method(outcome)

    with suppress(RuntimeError):
        answer.get_loop().call_soon_threadsafe(settle)


def _dispatch(updates: list[tuple[Job, Update]]) -> None:
    for job, update in updates:
        job.receive(update)
