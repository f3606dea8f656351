"""What the engine's thread reports: the engine's counters at one moment, and events as they happen."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from paged_attn.engine.engine import Engine


@dataclass(frozen=True)
class EngineSnapshot:
    """Requests and pages now, and counters since the engine was made.

    Attributes:
        pages_total: that there is memory for, with all their layers; pages_free: of those, what could be handed out now.
        pages_used: held by requests; pages_cached: held by the prefix cache alone, to be evicted when needed. Both include pages of which
            layers with windows have given back their part, so that used, cached and free may come to more than the total.
        waiting_of: how many of each tenant wait.
        pages_of: of layers with page tables of their own, by what they keep, pages in use and their bytes.
        snapshots: recurrent states at the ends of cached prefixes; snapshot_bytes: their memory.
        slots_total: of recurrent state, for requests and those; slots_used: by requests.
        pool_bytes: of all pages; state_bytes: of all slots. Both are taken once and for all.
        tokens_without_state: prompt tokens that the prefix cache had, of no use as no recurrent state was kept there.
        prompt_tokens: computed; cached_tokens: taken from the prefix cache instead.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_free: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0
    slots_total: int = 0
    slots_used: int = 0
    pool_bytes: int = 0
    state_bytes: int = 0
    tokens_without_state: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    waiting_of: Mapping[Hashable, int] = field(default_factory=dict)
    pages_of: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Engine) -> EngineSnapshot:
        kv, stats, scheduler, pool = engine.kv, engine.stats, engine.scheduler, engine.pool
        return cls(
            running=len(scheduler.running), waiting=len(scheduler.waiting), pages_total=kv.num_usable,
            pages_used=kv.held_pages, pages_cached=kv.cached_pages, pages_free=kv.allocator.num_free,
            snapshots=kv.states.num_snapshots, snapshot_bytes=kv.states.snapshot_bytes,
            slots_total=engine.budget.slots.most_running, slots_used=kv.states.num_in_use,
            pool_bytes=pool.nbytes, state_bytes=engine.budget.state_bytes,
            tokens_without_state=scheduler.stats.prompt_tokens_without_state,
            prompt_tokens=stats.prompt_tokens, cached_tokens=stats.cached_tokens, new_tokens=stats.new_tokens,
            preemptions=scheduler.stats.preemptions, waiting_of=dict(scheduler.waiting.count_of),
            pages_of=kv.use_by_retention(pool.page_elements * pool.dtype.itemsize),
        )  # fmt: skip


@dataclass(frozen=True)
class EndedRequest:
    """What is reported of a request at its end.

    Attributes:
        outcome: its finish reason, or why it was ended.
        seconds: since it arrived; queue_seconds: of those, until its first step. None: it had none.
        prompt_tokens, new_tokens: how many it had by then.
    """

    outcome: str
    seconds: float
    queue_seconds: float | None
    prompt_tokens: int
    new_tokens: int


class Observer:
    """Called on the engine's thread; this one does not care. Seconds are wall time."""

    def step(self, seconds: float) -> None: ...
    def step_failed(self) -> None: ...
    def first_token(self, seconds: float) -> None: ...  # since the request arrived
    def later_tokens(self, seconds: float, count: int) -> None: ...  # `count` tokens, each `seconds` after the previous one of its request
    def ended(self, request: EndedRequest) -> None: ...
