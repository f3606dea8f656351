"""Embeddings as OpenAI has them, scores of pairs as vLLM, reranking as Jina and Cohere."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import torch.nn.functional as F
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from paged_attn.asynchronous.job import Job, Prompt
from paged_attn.asynchronous.texts import Texts
from paged_attn.engine.engine import Engine
from paged_attn.engine.pooling.pooler import Pooler
from paged_attn.engine.pooling.texts import paired
from paged_attn.engine.requests import request as engine_request
from paged_attn.engine.requests.pooling_params import PoolingParams
from paged_attn.server.api.bodies import listed
from paged_attn.server.api.of_request import answered, call_of, caller_of, check_count, check_priority, ready, seconds_of, state_of
from paged_attn.server.api.pooling.bodies import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from paged_attn.server.http.error_reply import ERRORS
from paged_attn.server.http.errors import ApiError, bad_request

router = APIRouter(responses=ERRORS)
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
Pooled = list[engine_request.Request]


@router.post(EMBEDDINGS)
async def embeddings(request: Request, body: EmbeddingBody) -> Response:
    """An embedding of each text."""
    engine, pooler, texts = _ready(request, body)
    if pooler.head is not None:
        raise ApiError(400, f"{pooler.body.name} classifies and does not embed; it has {SCORE} and {RERANK}", code="wrong_task")
    try:
        pooler.check_dimensions(body.dimensions)
    except ValueError as error:
        raise bad_request(error, "dimensions") from error
    given = listed(body.input, "input")
    check_count(len(given), engine, state_of(request))
    params = pooler.params(engine.is_causal, body.pooling)

    async def reply(requests: Pooled, job: Job) -> dict[str, Any]:
        rows = [pooler.embedding(_row(each), body.normalize, body.dimensions).numpy() for each in requests]
        as_text = body.encoding_format == "base64"
        values = [base64.b64encode(row.astype("<f4").tobytes()).decode() if as_text else row.tolist() for row in rows]
        data = [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(values)]
        return {"object": "list", "data": data, "model": state_of(request).settings.model_name, "usage": _usage(job)}

    return await _answer(request, body, params, lambda: texts.prompts(given, caller_of(request).tenant, param="input"), reply)


@router.post(SCORE)
async def score(request: Request, body: ScoreBody) -> Response:
    """How well texts go together."""
    engine, pooler, texts = _ready(request, body)
    try:
        pairs = paired(body.text_1, body.text_2)
    except (ValueError, TypeError) as error:
        raise bad_request(error, "text_2") from error

    def reply(scores: Sequence[float], job: Job) -> dict[str, Any]:
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return {**head, "model": state_of(request).settings.model_name, "data": data, "usage": _usage(job)}

    return await _scored(request, body, engine, pooler, texts, pairs, reply)


@router.post(RERANK)
async def rerank(request: Request, body: RerankBody) -> Response:
    """Documents in the order of how well they go with a query, the best first."""
    engine, pooler, texts = _ready(request, body)
    documents, count = body.texts, body.count

    def reply(scores: Sequence[float], job: Job) -> dict[str, Any]:
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[:count]
        with_text = body.return_documents is not False
        results = [
            {"index": index, **({"document": {"text": documents[index]}} if with_text else {}), "relevance_score": scores[index]}
            for index in best
        ]
        return {
            "id": f"rerank-{uuid.uuid4().hex}", "model": state_of(request).settings.model_name, "usage": _usage(job), "results": results,
        }  # fmt: skip

    return await _scored(request, body, engine, pooler, texts, [(body.query, text) for text in documents], reply)


async def _scored(
    request: Request,
    body: PoolingBody,
    engine: Engine,
    pooler: Pooler,
    texts: Texts,
    pairs: Sequence[tuple[str, str]],
    reply: Callable[[Sequence[float], Job], dict[str, Any]],
) -> Response:
    """By a cross-encoder, or the cosine of embeddings, of which each text has one."""
    tenant, params = caller_of(request).tenant, pooler.params(engine.is_causal)
    if pooler.head is None:
        each = list(dict.fromkeys(text for pair in pairs for text in pair))
        check_count(len(each), engine, state_of(request))

        async def cosines(requests: Pooled, job: Job) -> dict[str, Any]:
            rows = dict(zip(each, (pooler.embedding(_row(one)) for one in requests), strict=True))
            return reply([float(F.cosine_similarity(rows[a], rows[b], dim=-1)) for a, b in pairs], job)

        return await _answer(request, body, params, lambda: texts.prompts(each, tenant, param="text"), cosines)
    check_count(len(pairs), engine, state_of(request))
    try:
        pooler.check_scores()
    except ValueError as error:
        raise bad_request(error, "model") from error

    async def by_head(requests: Pooled, job: Job) -> dict[str, Any]:
        rows = [_row(one) for one in requests]
        scores = await asyncio.to_thread(lambda: pooler.scores(pooler.logits(rows)).tolist())
        return reply(scores, job)

    return await _answer(request, body, params, lambda: texts.pairs(pairs, tenant), by_head)


async def _answer(
    request: Request,
    body: PoolingBody,
    params: PoolingParams,
    prompts: Callable[[], Coroutine[Any, Any, list[Prompt]]],
    reply: Callable[[Pooled, Job], Awaitable[dict[str, Any]]],
) -> Response:
    state, caller = state_of(request), caller_of(request)
    check_priority(body.priority, state)

    async def run() -> Response:
        call = call_of(request)
        namespace = caller.namespace(body.cache_salt, state.settings.share_prefixes)
        job = call.job = Job(
            await prompts(), [params], namespace, tenant=caller.tenant, priority=body.priority or 0, text_at_end=True, arrived=call.arrived
        )
        state.llm.submit(job)
        try:
            await job.accepted()
        except (ValueError, TypeError) as error:  # UnsupportedError is one
            raise bad_request(error, "input") from error
        return JSONResponse(await reply(await job.finished(), job))

    try:
        return await answered(request, run, seconds_of(body.timeout_seconds))
    finally:
        if (job := call_of(request).job) is not None:
            state.llm.thread.cancel(job)


def _ready(request: Request, body: PoolingBody) -> tuple[Engine, Pooler, Texts]:
    """Raises ApiError: 503 while nothing is served, 404 for another model, 400 for one that generates."""
    _, engine, texts = ready(request, body.model)
    if engine.pooler is None:
        name = type(engine.runner.model).__name__
        raise ApiError(400, f"this server's {name} generates and has no embeddings; serve it with --task embed", code="wrong_task")
    return engine, engine.pooler, texts


def _row(request: engine_request.Request) -> Any:
    try:
        return request.pooled_row()
    except ValueError as error:
        raise ApiError(500, str(error), code="bad_logits") from error


def _usage(job: Job) -> dict[str, Any]:
    usage = job.usage()
    return {name: usage[name] for name in ("prompt_tokens", "total_tokens", "prompt_tokens_details")}
