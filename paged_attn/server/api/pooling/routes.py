"""Embeddings as OpenAI has them, scores of pairs as vLLM, reranking as Jina and Cohere."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from paged_attn.asynchronous.job import Job
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.engine.engine import Engine
from paged_attn.engine.pooling.outputs import EmbeddingValues, PoolingOutput, ScoreValues
from paged_attn.engine.pooling.plans import PoolingPlan, embed_plan, score_plan
from paged_attn.server.api.bodies import listed
from paged_attn.server.api.of_request import answered, begin, call_of, caller_of, check_count, check_priority, ready, seconds_of, state_of
from paged_attn.server.api.pooling.bodies import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from paged_attn.server.http.errors import ERRORS, ApiError, bad_request

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
        return {"object": "list", "data": data, "model": state_of(request).settings.model_name, "usage": _usage(job)}

    return await _answer(request, body, plan, ("input", "input"), reply)


@router.post(SCORE)
async def score(request: Request, body: ScoreBody) -> Response:
    """How well texts go together."""
    plan = _score_plan(_ready(request, body), body.text_1, body.text_2)

    def reply(outputs: Sequence[PoolingOutput[ScoreValues]], job: Job) -> dict[str, Any]:
        data = [{"index": each.index, "object": "score", "score": each.outputs.score} for each in outputs]
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return {**head, "model": state_of(request).settings.model_name, "data": data, "usage": _usage(job)}

    return await _answer(request, body, plan, ("text_1", "text_2"), reply)


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
            "id": f"rerank-{uuid.uuid4().hex}", "model": state_of(request).settings.model_name, "usage": _usage(job), "results": results,
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
    caller = caller_of(request)

    async def run() -> Response:
        if plan.pairs:
            prompts = await texts.pairs(plan.prompts, caller.tenant, params=params)
        else:
            prompts = await texts.prompts(plan.prompts, caller.tenant, param=param)
        job = Job(
            prompts, [plan.params], caller.namespace(body.cache_salt, state.settings.share_prefixes),
            tenant=caller.tenant, priority=body.priority or 0, text_at_end=True, arrived=call_of(request).arrived,
        )  # fmt: skip
        await begin(request, job, param)
        requests = await job.finished()
        try:
            outputs = await asyncio.to_thread(plan.read, requests)
        except ValueError as error:  # of `Request.pooled_row`
            raise ApiError(500, str(error), code="bad_logits") from error
        return JSONResponse(reply(outputs, job))

    return await answered(request, run, seconds_of(body.timeout_seconds))


def _score_plan(engine: Engine, first: Any, second: Any) -> PoolingPlan:
    """Raises ApiError: 400 for texts that do not pair, and for a classifier that cannot score them."""
    try:
        return score_plan(engine, first, second)
    except UnsupportedError as error:
        raise bad_request(error, "model") from error
    except (ValueError, TypeError) as error:
        raise bad_request(error, "text_2") from error


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
