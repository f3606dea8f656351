"""Answers a file of requests through the app, without a socket: one JSON object per line, in the form of OpenAI's Batch API.

A request is `{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`, an answer
`{"id": ..., "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx
from fastapi import FastAPI

from paged_attn.asynchronous.errors import Status
from paged_attn.server.state import ServerState
from paged_attn.shown import shown

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score", "/v1/rerank",
)  # fmt: skip


@dataclass(frozen=True)
class BatchRequest:
    """One line of the file."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass
class BatchTotals:
    """What has been answered so far; `first_error` is the custom id and the text of the first answer that was an error."""

    answered: int = 0
    failed: int = 0
    new_tokens: int = 0
    first_error: str = ""


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests of a file, line by line; empty lines are skipped. Raises ValueError: a line is not a request, or its custom_id was used
    before; names the line; OSError: the file cannot be read."""
    seen = set[str]()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                request = _request(line, f"{path}, line {number}")
                if request.custom_id in seen:
                    raise ValueError(f"{path}, line {number}: custom_id {shown(request.custom_id)} was used before; make each unique")
                seen.add(request.custom_id)
                yield request


def answered_ids(path: Path) -> set[str]:
    """The custom ids in a file of answers. If its last line was cut off, as its writer was killed, that line is removed. Raises ValueError:
    another line is not an answer; names it."""
    written = path.read_bytes()
    if (end := written.rfind(b"\n") + 1) < len(written):
        os.truncate(path, end)
    lines = written[:end].decode().splitlines()
    return {_object(line, f"{path}, line {number}")["custom_id"] for number, line in enumerate(lines, 1)}


async def answer_requests(
    app: FastAPI, requests: Iterator[BatchRequest], done: Collection[str], out: TextIO, at_once: int, totals: BatchTotals
) -> None:
    """Send the requests to the app, and write each answer as soon as it is there: a line, flushed, in the order in which they end.

    Args:
        done: custom ids to leave out.
        at_once: requests under way at the same time.
        totals: counted up.

    Raises:
        BaseException: what ended the engine; answers until then are in `out`.
    """
    state: ServerState = app.state.server
    transport = httpx.ASGITransport(app=app, client=("batch", 0))
    async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:

        async def work() -> None:
            for request in requests:  # shared by all workers: each takes the next one
                if request.custom_id in done:
                    continue
                response = await client.post(request.url, json=request.body)
                if state.llm.thread.status is Status.DEAD and state.llm.thread.error is not None:
                    raise state.llm.thread.error
                _write(request, response, out, totals)

        workers = [asyncio.create_task(work()) for _ in range(at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()


def _write(request: BatchRequest, response: httpx.Response, out: TextIO, totals: BatchTotals) -> None:
    body, request_id = response.json(), response.headers["x-request-id"]
    answer = {"status_code": response.status_code, "request_id": request_id, "body": body}
    line = {"id": f"batch_req_{request_id}", "custom_id": request.custom_id, "response": answer, "error": None}
    out.write(json.dumps(line, ensure_ascii=False) + "\n")
    out.flush()
    totals.answered += 1
    usage = body.get("usage") or {}
    totals.new_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0
    if response.is_error:
        totals.failed += 1
        totals.first_error = totals.first_error or f"{shown(request.custom_id)}: {body['error']['message']}"


def _request(line: str, where: str) -> BatchRequest:
    given = _object(line, where)
    custom_id, url, body = given["custom_id"], given.get("url"), given.get("body")
    if given.get("method", "POST") != "POST":
        raise ValueError(f"{where}: method is {shown(given['method'])}; allowed is POST")
    if url not in URLS:
        raise ValueError(f"{where}: url is {shown(url)}; allowed are {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError(f"{where}: body is {shown(body)}; it must be an object, as the route takes it")
    if body.get("stream"):
        raise ValueError(f"{where}: stream is {shown(body['stream'])}; a file has no streams: leave it out")
    return BatchRequest(custom_id, url, body)


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(given, dict) or not isinstance(given.get("custom_id"), str):
        raise ValueError(f"{where}: got {shown(given)}; each line is an object with the text custom_id")
    return given
