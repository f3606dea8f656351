"""Embeddings as in OpenAI's API, scores of pairs as in vLLM's, reranking as in Jina's and Cohere's."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from paged_attn.asynchronous.job import Job
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.engine import Engine
from paged_attn.engine.pooling.outputs import EmbeddingValues, PoolingOutput, ScoreValues
from paged_attn.engine.pooling.plans import PoolingPlan, embed_plan, score_plan
from paged_attn.server.api.bodies import PROMPTS, SentBody, cut_of, listed
from paged_attn.server.api.fields.bounds import bounded
from paged_attn.server.api.request_state import (
    call_of,
    caller_of,
    check_count,
    check_priority,
    ready,
    run_until_ended,
    seconds_of,
    state_of,
    submit_and_wait,
)
from paged_attn.server.http.errors import ERRORS, ApiError, bad_request, not_allowed

_TEXTS: list[Any] = [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]


class PoolingBody(SentBody):
    """What these routes share."""

    ignored = frozenset({"user"})

    truncate_prompt_tokens: int | None = bounded(
        -1, description="extension: only the first so many tokens of a longer text count; -1: as many as there is room for"
    )


class EmbeddingBody(PoolingBody):
    """The body of POST /v1/embeddings."""

    input: Any = Field(
        description="a text, a list of texts, a list of token ids, or a list of such lists", json_schema_extra={"anyOf": PROMPTS}
    )
    encoding_format: Literal["float", "base64"] | None = Field(None, description="default float; base64 is of float32, little end first")
    dimensions: int | None = bounded(1, description="only the first so many numbers, normalized again")
    pooling: Literal["last", "mean", "cls"] | None = Field(None, description="extension: default: as the checkpoint says")
    normalize: bool | None = Field(None, description="extension: default: as the checkpoint says, else true")


class ScoreBody(PoolingBody):
    """The body of POST /v1/score, as vLLM has it."""

    text_1: Any = Field(description="a text, or a list of texts", json_schema_extra={"anyOf": _TEXTS})
    text_2: Any = Field(description="a text or a list of texts: one with each of many, or as many", json_schema_extra={"anyOf": _TEXTS})


class RerankBody(PoolingBody):
    """The body of POST /v1/rerank, as Jina and Cohere have it."""

    query: str
    documents: Any = Field(description='texts, or {"text": ...}', json_schema_extra={"type": "array", "minItems": 1})
    top_n: int | None = bounded(1, description="only the best so many; default: all")
    return_documents: bool | None = Field(None, description="the documents' texts in the answer; default true")

    @property
    def texts(self) -> list[str]:
        """The documents. Raises ApiError: 400 for anything else."""
        given = self.documents if isinstance(self.documents, list) else []
        texts = [each.get("text") if isinstance(each, dict) and len(each) == 1 else each for each in given]
        found = [text for text in texts if isinstance(text, str)]
        if not texts or len(found) < len(texts):
            raise not_allowed("documents", self.documents, 'a list of texts, or of {"text": ...}')
        return found

    @property
    def count(self) -> int | None:
        """How many of the best documents are wanted; None: all. Raises ApiError: 400 for less than one."""
        if self.top_n is not None and self.top_n < 1:
            raise not_allowed("top_n", self.top_n, "1 or more")
        return self.top_n


router = APIRouter(responses=ERRORS)
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"


@router.post(EMBEDDINGS)
async def embeddings(request: Request, body: EmbeddingBody) -> Response:
    """An embedding of each text."""
    engine = _ready(request, body)
    if (pooler := engine.pooler) is not None and pooler.head is not None:
        raise ApiError(400, f"{pooler.body.name} classifies and does not embed; it has {SCORE} and {RERANK}", code="wrong_task")
    try:
        plan = embed_plan(engine, listed(body.input, "input"), body.pooling, body.normalize, body.dimensions)
    except ValueError as error:
        raise bad_request(error, "dimensions") from error

    def reply(outputs: Sequence[PoolingOutput[EmbeddingValues]], job: Job) -> dict[str, Any]:
        values: list[Any] = [each.outputs.embedding for each in outputs]
        if body.encoding_format == "base64":
            values = [base64.b64encode(np.asarray(value, "<f4").tobytes()).decode() for value in values]
        data = [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(values)]
        return {"object": "list", "data": data, "model": state_of(request).settings.first_name, "usage": _usage(job)}

    return await _answer(request, body, plan, ("input", "input"), reply)


@router.post("/score", include_in_schema=False)
@router.post(SCORE)
async def score(request: Request, body: ScoreBody) -> Response:
    """How well texts go together."""
    plan = _score_plan(_ready(request, body), body.text_1, body.text_2)

    def reply(outputs: Sequence[PoolingOutput[ScoreValues]], job: Job) -> dict[str, Any]:
        data = [{"index": each.index, "object": "score", "score": each.outputs.score} for each in outputs]
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return {**head, "model": state_of(request).settings.first_name, "data": data, "usage": _usage(job)}

    return await _answer(request, body, plan, ("text_1", "text_2"), reply)


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post(RERANK)
async def rerank(request: Request, body: RerankBody) -> Response:
    """Documents in the order of how well they go with a query, the best first."""
    engine = _ready(request, body)
    documents, count = body.texts, body.count

    def reply(outputs: Sequence[PoolingOutput[ScoreValues]], job: Job) -> dict[str, Any]:
        with_text = body.return_documents is not False
        results = [
            {
                "index": each.index,
                **({"document": {"text": documents[each.index]}} if with_text else {}),
                "relevance_score": each.outputs.score,
            }
            for each in sorted(outputs, key=lambda each: -each.outputs.score)[:count]
        ]
        return {
            "id": f"rerank-{uuid.uuid4().hex}", "model": state_of(request).settings.first_name, "usage": _usage(job), "results": results,
        }  # fmt: skip

    return await _answer(request, body, _score_plan(engine, body.query, documents), ("query", "documents"), reply)


async def _answer(
    request: Request,
    body: PoolingBody,
    plan: PoolingPlan,
    params: tuple[str, str],
    reply: Callable[[list[PoolingOutput[Any]], Job], dict[str, Any]],
) -> Response:
    """Run the plan; `params` is what errors call its texts, those of both sides."""
    state, engine, texts = ready(request, body.model)
    param = " or ".join(dict.fromkeys(params))
    check_count(len(plan.prompts), engine, state, param)
    check_priority(body.priority, state)
    caller, cut = caller_of(request), cut_of(body.truncate_prompt_tokens, engine, 0, keeps_end=False)

    async def run() -> Response:
        if plan.pairs:
            prompts = await texts.pairs(plan.prompts, caller.tenant, params=params, cut=cut)
        else:
            names = [params[side] for side in plan.sides] if plan.sides else param
            prompts = await texts.prompts(plan.prompts, caller.tenant, param=names, cut=cut)
        job = Job(
            prompts, [plan.params], caller.namespace(body.cache_salt, state.settings.share_prefixes),
            tenant=caller.tenant, priority=body.priority or 0, text_at_end=True, arrived=call_of(request).arrived,
        )  # fmt: skip
        await submit_and_wait(request, job, param)
        requests = await job.finished()
        try:
            outputs = await asyncio.to_thread(plan.read, requests)
        except ValueError as error:  # raised by `Request.pooled_row`
            raise ApiError(500, str(error), code="bad_logits") from error
        return JSONResponse(reply(outputs, job))

    return await run_until_ended(request, run, seconds_of(body.timeout_seconds))


def _score_plan(engine: Engine, first: Any, second: Any) -> PoolingPlan:
    """Raises ApiError: 400 for texts that do not pair, and for a classifier that cannot score them."""
    try:
        return score_plan(engine, first, second)
    except UnsupportedError as error:
        raise bad_request(error, "model") from error
    except (ValueError, TypeError) as error:  # message of `paired`, which begins with the field at fault
        raise bad_request(error, str(error).partition(":")[0]) from error


def _ready(request: Request, body: PoolingBody) -> Engine:
    """Raises ApiError: 503 while nothing is served, 404 for another model, 400 for one that generates."""
    _, engine, _ = ready(request, body.model)
    if engine.pooler is None:
        name = type(engine.runner.model).__name__
        raise ApiError(400, f"this server's {name} generates and has no embeddings; serve it with --task embed", code="wrong_task")
    return engine


def _usage(job: Job) -> dict[str, Any]:
    usage = job.usage()
    return {name: usage[name] for name in ("prompt_tokens", "total_tokens", "prompt_tokens_details")}
