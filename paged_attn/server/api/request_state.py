"""What routes share: the state behind a request, checks, and running a job."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from paged_attn.asynchronous.job import Job
from paged_attn.asynchronous.job_queue import too_many_prompts
from paged_attn.asynchronous.texts import Texts
from paged_attn.engine.engine import Engine
from paged_attn.server.http.call import Call
from paged_attn.server.http.callers import Caller
from paged_attn.server.http.disconnect import EventStream
from paged_attn.server.http.errors import CLIENT_GONE, ApiError, bad_field, bad_request
from paged_attn.shown import shown

if TYPE_CHECKING:
    from paged_attn.server.state import ServerState


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def call_of(request: Request) -> Call:
    call: Call = request.state.call
    return call


def caller_of(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def ready(request: Request, model: str | None) -> tuple[ServerState, Engine, Texts]:
    """Raises NotServingError while nothing is served, ApiError: 404 for another model."""
    state = state_of(request)
    engine = state.llm.thread.refuse_unless_ready()
    if model is not None:
        check_model(state, model)
    assert state.llm.texts is not None
    return state, engine, state.llm.texts


def model_names(state: ServerState) -> list[str]:
    """The names of the model and of its adapters."""
    engine = state.llm.thread.engine
    return [*state.settings.names, *(engine.adapters.loaded if engine is not None and engine.adapters is not None else ())]


def check_model(state: ServerState, name: str) -> None:
    """Raises ApiError: 404 for what is neither the served model nor an adapter of it."""
    if name not in (known := model_names(state)):
        listed = ", ".join(map(repr, known))
        raise ApiError(404, f"there is no model {shown(name)}; this server has {listed}", param="model", code="model_not_found")


def check_count(count: int, engine: Engine, state: ServerState, param: str = "prompt") -> None:
    """Raises PromptError for more prompts than may run and wait, before any of them is tokenized."""
    if count > engine.config.max_requests + state.settings.max_queue:
        raise too_many_prompts(count, engine.config.max_requests, state.settings.max_queue, param)


def check_priority(priority: int | None, state: ServerState) -> None:
    """Raises ApiError: 400 where requests may have none."""
    if priority and not state.settings.allow_priority:
        raise bad_field("priority", "this server lets nobody jump its queue (--allow-priority); leave it out")


def seconds_of(given: float | None) -> float | None:
    """Raises ApiError: 400 for a timeout that is none."""
    if given is not None and not 0 < given < float("inf"):
        raise bad_field("timeout_seconds", f"got {given}; allowed: a finite number above 0")
    return given


async def run_until_ended(request: Request, work: Callable[[], Coroutine[Any, Any, Response]], seconds: float | None = None) -> Response:
    """What `work` returns. It is cancelled when the client leaves, when its time is over, or by its id, however far it is. `seconds`: that
    the client gives it; the server may give it less. Raises ApiError: what it was ended with."""
    state, call = state_of(request), call_of(request)
    state.calls.enter(call, caller_of(request))
    most = min((each for each in (seconds, state.settings.request_seconds) if each is not None), default=None)
    if most is not None:
        call.fail_after(most, ApiError(504, f"the request did not end within {most:g} s and was cancelled", code="request_timeout"))
    answer: Response | None = None
    try:
        answer = await call.unless_ended(request.receive, work())
    finally:
        if call.job is not None and not isinstance(answer, EventStream):
            state.llm.thread.cancel(call.job)
    return Response(status_code=CLIENT_GONE) if answer is None else answer  # nobody reads it, but the metrics count it


async def submit_and_wait(request: Request, job: Job, param: str) -> None:
    """Let the engine take a job, which `run_until_ended` ends. Raises ApiError: 400 in its words for what it refuses, with this `param`."""
    call_of(request).job = job
    state_of(request).llm.submit(job)
    try:
        await job.accepted()
    except (ValueError, TypeError) as error:  # UnsupportedError is one
        raise bad_request(error, param) from error
