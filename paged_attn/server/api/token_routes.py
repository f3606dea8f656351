"""Tokens of texts and chats, and texts of tokens, as vLLM's server has them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from paged_attn.asynchronous.job import Prompt
from paged_attn.asynchronous.texts import Texts, length_of
from paged_attn.chat.request import ChatRequest
from paged_attn.server.api.chat_body import refuse_two_ends
from paged_attn.server.api.fields.bounds import Closed, Messages, Name, Settings, Tools, at_most
from paged_attn.server.api.messages.body import CountBody
from paged_attn.server.api.request_state import caller_of, ready, run_until_ended, state_of
from paged_attn.server.api.responses.body import ResponsesBody
from paged_attn.server.http.errors import ANTHROPIC_ERRORS, ERRORS, MESSAGES, ApiError, bad_field

router = APIRouter(responses=ERRORS)
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
MAX_TOKENS = 1 << 18  # detokenized in one request
Tokens = Annotated[list[int], Field(max_length=MAX_TOKENS, fail_fast=True), at_most(MAX_TOKENS, "ids")]


class TokenizeBody(Closed):
    """A prompt, or messages: one of them."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="of a prompt; default true. Messages have those of their template")
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = Field(None, description="of messages; default true")
    continue_final_message: bool | None = Field(None, description="of messages")
    chat_template_kwargs: Settings | None = None
    tools: Tools | None = None


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(Closed):
    model: Name | None = None
    tokens: Tokens = Field(description="token ids")


class DetokenizeReply(BaseModel):
    prompt: str


class CountReply(BaseModel):
    input_tokens: int


class InputTokensReply(CountReply):
    object: Literal["response.input_tokens"]


class TokenizerReply(BaseModel):
    tokenizer_class: str
    chat_template: str | dict[str, str] | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


@router.post("/tokenize", response_model=TokenizeReply)
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """The token ids of a prompt, or of messages in the chat template."""
    _, engine, texts = ready(request, body.model)

    async def work() -> Response:
        (prompt,) = await _prompts(request, body, texts)
        ids = list(prompt.token_ids)
        strings = await texts.pieces_of(ids, caller_of(request).tenant) if body.return_token_strs else None
        reply = {"count": len(ids), "max_model_len": engine.input_processor.room, "tokens": ids, "token_strs": strings}
        return JSONResponse(reply)

    return await run_until_ended(request, work)


@router.post("/detokenize", response_model=DetokenizeReply)
async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    """The text of token ids, special tokens included."""
    _, _, texts = ready(request, body.model)

    async def work() -> Response:
        return JSONResponse({"prompt": await texts.text_of(body.tokens, caller_of(request).tenant)})

    return await run_until_ended(request, work)


@router.post(f"{MESSAGES}/count_tokens", response_model=CountReply, responses=ANTHROPIC_ERRORS)
async def count_tokens(request: Request, body: CountBody) -> Response:
    """How many tokens a conversation of Anthropic's API has in the chat template, tools and all."""
    return await _counted(request, body, {})


@router.post("/v1/responses/input_tokens", response_model=InputTokensReply)
async def input_tokens(request: Request, body: ResponsesBody) -> Response:
    """How many tokens the input of OpenAI's Responses API has in the chat template, tools and all."""
    return await _counted(request, body, {"object": "response.input_tokens"})


async def _counted(request: Request, body: CountBody | ResponsesBody, beside: dict[str, str]) -> Response:
    _, _, texts = ready(request, body.model)
    client, settings = caller_of(request).tenant, state_of(request).settings

    async def work() -> Response:
        make = functools.partial(body.chat_request, settings.tool_parser, settings.reasoning_parser)
        prompt = await texts.chat(make, body.num_characters, None, client, param=body.prompt_name)
        return JSONResponse({**beside, "input_tokens": len(prompt.token_ids)})

    return await run_until_ended(request, work)


@router.get("/tokenizer_info", response_model=TokenizerReply)
async def tokenizer_info(request: Request) -> Response:
    """What lm-evaluation-harness asks about a tokenizer that it has not itself."""
    _, _, texts = ready(request, None)
    own = texts.tokenizer
    if own is None:
        raise ApiError(404, "this model has no tokenizer; send token ids", code="no_tokenizer")
    special = {name: getattr(own, name) for name in SPECIAL}
    return JSONResponse({"tokenizer_class": type(own).__name__, "chat_template": own.chat_template, **special})


async def _prompts(request: Request, body: TokenizeBody, texts: Texts) -> Sequence[Prompt]:
    client, settings = caller_of(request).tenant, state_of(request).settings
    if (body.prompt is None) == (body.messages is None):
        got = "neither" if body.prompt is None else "both"
        raise ApiError(400, f"prompt or messages: got {got}; give one of them", param="prompt")
    given: dict[str, Any] = {
        "add_generation_prompt": body.add_generation_prompt, "continue_final_message": body.continue_final_message,
        "chat_template_kwargs": body.chat_template_kwargs, "tools": body.tools,
    }  # fmt: skip
    if body.prompt is not None:
        if (of_chat := next((name for name, value in given.items() if value), None)) is not None:
            raise bad_field(of_chat, "got one beside prompt; allowed: beside messages")
        return await texts.prompts([body.prompt], client, body.add_special_tokens is not False)
    if body.add_special_tokens:
        raise bad_field("add_special_tokens", "got true beside messages, whose template has them; leave it out")
    refuse_two_ends(body.add_generation_prompt, body.continue_final_message)
    assert body.messages is not None
    messages = body.messages
    chat = ChatRequest(
        messages, body.tools, chat_template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt is not False, continue_final_message=bool(body.continue_final_message),
        tool_parser=settings.tool_parser, reasoning_parser=settings.reasoning_parser,
    )  # fmt: skip
    return [await texts.chat(lambda: chat, length_of(messages), None, client)]
