"""Schedulers without a model: requests that arrive, and what an engine does with the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paged_attn import EngineConfig
from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.requests.request import Request
from paged_attn.engine.scheduling.scheduler import Scheduler
from paged_attn.engine.scheduling.step_plan import ScheduledStep
from tests.engine.models import request_of


def scheduler_of(num_pages: int = 100, page_size: int = 4, prefix_cache: bool = False, **config: Any) -> Scheduler:
    return Scheduler(EngineConfig(page_size=page_size, **config), KVManager(num_pages, page_size, prefix_cache))


def arrive(
    scheduler: Scheduler,
    *lengths: int,
    tokens: list[int] | None = None,
    namespace: Any = None,
    tenant: Any = None,
    priority: int = 0,
    new: int = 1000,
) -> list[Request]:
    """A request per length; its id is r and its number by arrival."""
    requests = []
    for length in lengths:
        request = request_of(tokens or [1 + length % 7] * length, namespace)
        request.tenant = tenant
        request.arrival = max((r.arrival for r in (*scheduler.waiting, *scheduler.running)), default=-1) + 1
        request.id, request.max_new_tokens, request.priority = f"r{request.arrival}", new, priority
        scheduler.waiting.append(request)
        requests.append(request)
    return requests


@dataclass(frozen=True)
class Scheduled:
    """`count` tokens of a request from its first uncached one on; `samples` if they reach its last token."""

    request: Request
    count: int
    samples: bool


def each(step: ScheduledStep) -> list[Scheduled]:
    return [Scheduled(*row) for row in zip(step.requests, step.counts.tolist(), step.samples.tolist(), strict=True)]


def run(scheduled: Sequence[Scheduled]) -> None:
    """What the engine does after a step; no request ends by itself."""
    launch(scheduled)
    collect(*(s.request for s in scheduled if s.samples))


def launch(scheduled: Sequence[Scheduled]) -> None:
    """What the engine does when a step is on its way and its tokens are not known yet."""
    for s in scheduled:
        s.request.num_cached += s.count
        s.request.num_tokens += s.samples


def collect(*requests: Request) -> None:
    """The token under way of each request has come."""
    for request in requests:
        request.num_validated = len(request.tokens)
        request.tokens.append(9)


def counts(scheduled: Sequence[Scheduled]) -> list[tuple[str, int, bool]]:
    return [(s.request.id, s.count, s.samples) for s in scheduled]
