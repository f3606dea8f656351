"""OpenAI's and Anthropic's chat and completion routes, and one that cancels requests by their id."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from paged_attn.asynchronous.job import Job, Prompt
from paged_attn.asynchronous.texts import Texts
from paged_attn.engine.engine import Engine
from paged_attn.engine.sampling.structured.guides import Guide
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.server.api.bodies import Body, CompletionBody, listed
from paged_attn.server.api.chat_body import ChatBody
from paged_attn.server.api.messages.body import MessagesBody
from paged_attn.server.api.messages.reply import MessagesReply
from paged_attn.server.api.replies import ChatReply, CompletionReply, Reply
from paged_attn.server.api.request_state import (
    call_of,
    caller_of,
    check_count,
    check_model,
    check_priority,
    model_names,
    ready,
    run_until_ended,
    seconds_of,
    state_of,
    submit_and_wait,
)  # fmt: skip
from paged_attn.server.api.responses.body import ResponsesBody
from paged_attn.server.api.responses.reply import ResponsesReply
from paged_attn.server.http.callers import Caller
from paged_attn.server.http.disconnect import EventStream
from paged_attn.server.http.errors import ANTHROPIC_ERRORS, ERRORS, MESSAGES, ApiError, bad_field, bad_request
from paged_attn.shown import shown

if TYPE_CHECKING:
    from paged_attn.server.state import ServerState

router = APIRouter(responses=ERRORS)
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
AnyReply: TypeAlias = "Reply | ResponsesReply | MessagesReply"
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "the answer; with stream=true its parts as events", "content": {"text/event-stream": {}}}
}


@router.get("/v1/models")
async def models(request: Request) -> Response:
    state = state_of(request)
    names = model_names(state)
    pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # Anthropic's
    return JSONResponse({"object": "list", "data": [_model(state, name) for name in names], **pages})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    state = state_of(request)
    check_model(state, name)
    return JSONResponse(_model(state, name))


@router.post(COMPLETIONS, responses=ANSWERS)
async def completions(request: Request, body: CompletionBody) -> Response:
    """Complete one or several prompts."""
    state, engine, texts = _ready(request, body)
    prompts = listed(body.prompt)
    check_count(len(prompts) * body.num_answers, engine, state)
    with_special, cut, tenant = body.add_special_tokens is not False, body.cut(engine), caller_of(request).tenant
    return await _answer(request, body, texts, lambda: texts.prompts(prompts, tenant, with_special, cut=cut), CompletionReply)


@router.post(CHATS, responses=ANSWERS)
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """The next message of a conversation."""
    return await _chat_answer(request, body, ChatReply)


@router.post(RESPONSES, responses=ANSWERS)
async def responses(request: Request, body: ResponsesBody) -> Response:
    """The next items of a conversation. Nothing is stored: the whole conversation is sent each time."""
    return await _chat_answer(request, body, ResponsesReply)


@router.post(MESSAGES, responses={**ANTHROPIC_ERRORS, **ANSWERS})
async def messages(request: Request, body: MessagesBody) -> Response:
    """The next message of a conversation, in Anthropic's format; errors too."""
    return await _chat_answer(request, body, MessagesReply)


async def _chat_answer(
    request: Request, body: ChatBody | ResponsesBody | MessagesBody, make_reply: Callable[[Job, Any, Texts, str], AnyReply]
) -> Response:
    state, engine, texts = _ready(request, body)
    guide, cut, tenant = body.wanted_guide(), body.cut(engine), caller_of(request).tenant
    parsers = state.settings.tool_parser, state.settings.reasoning_parser

    async def prompts() -> list[Prompt]:
        return [await texts.chat(lambda: body.chat_request(*parsers), body.num_characters, guide, tenant, cut, body.prompt_name)]

    return await _answer(request, body, texts, prompts, make_reply)


@router.post("/v1/requests/{request_id:path}/cancel")
async def cancel(request: Request, request_id: str) -> Response:
    """End the requests that this key has sent with this x-request-id; each of them gets an error of status 499."""
    count = state_of(request).calls.cancel(caller_of(request), request_id)
    if not count:
        raise ApiError(404, f"there is no request {shown(request_id)} of this key under way", param="request_id")
    return JSONResponse({"id": request_id, "cancelled": count})


async def _answer(
    request: Request,
    body: Body,
    texts: Texts,
    prompts: Callable[[], Coroutine[Any, Any, list[Prompt]]],
    make_reply: Callable[[Job, Any, Texts, str], AnyReply],
) -> Response:
    state = state_of(request)

    async def run() -> Response:
        job = await _job(await prompts(), body, request)
        await submit_and_wait(request, job, body.prompt_name)
        reply = make_reply(job, body, texts, job.lora or state.settings.first_name)
        if body.stream:
            return EventStream(reply.lines(), lambda: state.llm.thread.cancel(job))
        return JSONResponse(await reply.whole())

    return await run_until_ended(request, run, seconds_of(body.timeout_seconds))


async def _job(prompts: Sequence[Prompt], body: Body, request: Request) -> Job:
    state, call, caller = state_of(request), call_of(request), caller_of(request)
    engine = state.llm.thread.refuse_unless_ready()
    check_priority(body.priority, state)
    body.check_scores(sum(len(prompt.token_ids) for prompt in prompts))
    params, form = body.sampling_params(_room(engine, prompts), engine.default_params), prompts[0].form
    if form is not None:
        try:
            params = form.enforced(params)
        except ValueError as error:
            raise _not_enforced(error) from error
    guide = await _checked(params, engine, state, caller, has_tools=form is not None and form.grammar is not None)
    answers = params.answers(body.num_answers)
    namespace = caller.namespace(body.cache_salt, state.settings.share_prefixes)
    return Job(
        prompts, answers, namespace, tenant=caller.tenant, priority=body.priority or 0, guide=guide, arrived=call.arrived,
        text_at_end=body.text_at_end and not body.stream, lora=None if body.model in (None, *state.settings.names) else body.model,
    )  # fmt: skip


async def _checked(params: SamplingParams, engine: Engine, state: ServerState, caller: Caller, has_tools: bool) -> Guide | None:
    """Check what the engine would refuse, to name the field at fault. Schemas and grammars are parsed here, outside the engine's thread.
    `has_tools`: the grammar was made from tools. Raises ApiError: 400."""
    try:
        engine.limits.check_chosen(params)
    except ValueError as error:
        raise bad_request(error, str(error).partition(":")[0]) from error
    try:
        return await state.llm.guide(params, caller.tenant)
    except ValueError as error:  # UnsupportedError is one
        if has_tools:
            raise _not_enforced(error) from error
        raise bad_request(error, None if params.guide is None else params.guide[0]) from error


def _not_enforced(error: ValueError) -> ApiError:
    return bad_field("tools", f"calls cannot be enforced with these parameters: {error}")


def _ready(request: Request, body: Body) -> tuple[ServerState, Engine, Texts]:
    """`ready`, but also raises ApiError 400 for a model that does not generate, and for a body that contradicts itself."""
    state, engine, texts = ready(request, body.model)
    if (pooler := engine.pooler) is not None:
        where = "/v1/embeddings" if pooler.head is None else "/v1/score and /v1/rerank"
        raise ApiError(400, f"this server's {pooler.body.name} continues no text; it has {where}", code="wrong_task")
    _ = body.includes_usage, body.num_answers
    return state, engine, texts


def _model(state: ServerState, name: str) -> dict[str, Any]:
    engine = state.llm.thread.engine
    limit = engine.input_processor.room if engine is not None else None
    anthropics = {"created_at": datetime.fromtimestamp(state.created, UTC).isoformat(), "max_input_tokens": limit, "max_tokens": limit}
    model = {
        "id": name, "object": "model", "created": state.created, "owned_by": "paged_attn", "max_model_len": limit,
        "type": "model", "display_name": name, **anthropics,
    }  # fmt: skip
    return model if name in state.settings.names else {**model, "parent": state.settings.first_name}


def _room(engine: Engine, prompts: Sequence[Prompt]) -> int:
    """How many new tokens fit after the longest prompt; at least 1, so that the engine itself refuses a prompt that is too long."""
    return max(engine.input_processor.room - max(len(prompt.token_ids) for prompt in prompts) + 1, 1)
