"""The routes: OpenAI's, and those for operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from paged_attn.engine.engine import Engine
from paged_attn.engine.sampling_params import SEED_LIMIT, SamplingParams
from paged_attn.server.bodies import Body, ChatBody, CompletionBody
from paged_attn.server.disconnect import ClientGone, EventStream, unless_gone
from paged_attn.server.errors import ApiError, bad_request
from paged_attn.server.job import Job, Prompt
from paged_attn.server.replies import ChatReply, CompletionReply, Reply
from paged_attn.server.status import Status
from paged_attn.server.texts import Texts

if TYPE_CHECKING:
    from paged_attn.server.app import ServerState

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests are served; otherwise 503 with the reason."""
    thread = _state(request).thread
    ready = thread.status is Status.READY
    return JSONResponse({"status": str(thread.status), "reason": thread.describe()}, 200 if ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(_state(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model(_state(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    state = _state(request)
    _check_model(state, name)
    return JSONResponse(_model(state))


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionBody) -> Response:
    """Complete one or several prompts."""
    state, engine, texts = _ready(request, body)
    prompts = await texts.prompts(body.prompt)
    job = await _job(prompts, body, engine, state)
    return await _answer(request, job, CompletionReply(job, body, texts, state.settings.model_name))


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """The next message of a conversation."""
    state, engine, texts = _ready(request, body)
    prompt = await texts.chat(body.plain_messages(), body.chat_template_kwargs or {})
    job = await _job([prompt], body, engine, state)
    return await _answer(request, job, ChatReply(job, body, texts, state.settings.model_name))


async def _job(prompts: Sequence[Prompt], body: Body, engine: Engine, state: ServerState) -> Job:
    if body.priority and not state.settings.allow_priority:
        raise ApiError(400, "priority: this server lets nobody jump its queue (--allow-priority); leave it out", param="priority")
    params = body.sampling_params(_room(engine, prompts))
    await _check_params(params, engine, state)
    answers = [_with_seed(params, number) for number in range(body.num_answers)]
    return Job(prompts, answers, body.cache_salt, priority=body.priority or 0, text_at_end=not body.stream)


def _with_seed(params: SamplingParams, number: int) -> SamplingParams:
    """The params of one of several answers: with a seed each has its own."""
    return params if params.seed is None or number == 0 else replace(params, seed=(params.seed + number) % SEED_LIMIT)


async def _check_params(params: SamplingParams, engine: Engine, state: ServerState) -> None:
    """What the engine would refuse, said of the field at fault. What an answer shall follow is read here, beside the engine.

    Raises:
        ApiError: 400.
    """
    assert state.texts is not None
    try:
        engine.limits.check_biases(params.biases)
    except ValueError as error:
        raise bad_request(error, "logit_bias") from error
    if params.guide is not None:
        try:
            await state.texts.in_worker(lambda: engine.new_requests.guides.guide(params))
        except ValueError as error:  # UnsupportedError is one
            raise bad_request(error, params.guide[0]) from error


async def _answer(request: Request, job: Job, reply: Reply) -> Response:
    """Run the job; it is cancelled when the client leaves, however far it is."""
    thread = _state(request).thread
    streams, begun = bool(reply.body.stream), False
    thread.submit(job)
    try:
        await job.accepted()
        if streams:
            begun = True
            return EventStream(reply.lines(), lambda: thread.cancel(job))
        whole = await unless_gone(request.receive, reply.whole())
        return ClientGone() if whole is None else JSONResponse(whole)
    finally:
        if not begun:
            thread.cancel(job)


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _ready(request: Request, body: Body) -> tuple[ServerState, Engine, Texts]:
    """Raises ApiError: 503 while nothing is served, 404 for another model, 400 for a body that contradicts itself."""
    state = _state(request)
    engine = state.thread.refuse_unless_ready()
    assert state.texts is not None
    if body.model is not None:
        _check_model(state, body.model)
    _ = body.includes_usage
    return state, engine, state.texts


def _check_model(state: ServerState, name: str) -> None:
    if name != (mine := state.settings.model_name):
        raise ApiError(404, f"there is no model {name!r}; this server has {mine!r}", param="model", code="model_not_found")


def _model(state: ServerState) -> dict[str, Any]:
    engine = state.thread.engine
    limit = engine.limits.max_positions if engine is not None else None
    return {"id": state.settings.model_name, "object": "model", "created": state.created, "owned_by": "paged_attn", "max_model_len": limit}


def _room(engine: Engine, prompts: Sequence[Prompt]) -> int:
    """New tokens that positions and pool have room for after the longest prompt; at least 1, so that a prompt that is too long gets the
    engine's words."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    tokens = engine.kv.num_usable * engine.config.page_size
    limit = engine.limits.max_positions
    return max((tokens if limit is None else min(tokens, limit)) - longest + 1, 1)
