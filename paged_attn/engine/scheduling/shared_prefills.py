"""Requests that wait while another request computes their common prefix, so that it is computed once."""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable

from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.memory.radix_node import num_common
from paged_attn.engine.requests.request import Request
from paged_attn.engine.scheduling.step_plan import StepPlan

MAX_WAITS = 3  # most times that a request is held back, whatever happens to those it waits for


class SharedPrefills:
    """Which request computes which prefix, and which requests wait for it.

    A prefix is identified by the node where its match in the prefix cache ends and by the next `min_tokens` tokens. The request that
    computes it is its holder, until one of two things happens: a finite token has validated the prefix, so that all others can use its
    pages; or the holder stops running, for any reason.

    Args:
        min_tokens: how many tokens beyond the prefix cache two requests must have in common for one to wait, in whole pages; 0: none waits.
    """

    def __init__(self, kv: KVManager, min_tokens: int) -> None:
        self._kv = kv
        self._length = -(-min_tokens // kv.page_size) * kv.page_size if kv.tree is not None else 0
        self._holders: dict[Hashable, Request] = {}
        self._prefixes: dict[Request, tuple[Hashable, int]] = {}  # per holder: its prefix key, and how many of its tokens were cached
        self._held: dict[Request, dict[Request, None]] = {}  # by holder
        self._waits_for: dict[Request, Request] = {}
        self._times: dict[Request, int] = {}  # how often each request was held back

    def holder_for(self, request: Request) -> Request | None:
        """The request for which a request that has just adopted its cached prefix should wait.

        With recurrent state this may add a snapshot point to the holder: see `Request.snapshot_points`.
        """
        key = self._key(request, request.num_reusable)
        holder = self._holders.get(key) if key is not None else None
        if holder is None or holder.priority > request.priority or self._times.get(request, 0) >= MAX_WAITS or self._is_shared(holder):
            return None
        return holder if self._kv.states.snapshots is None or self._will_keep_state_for(request, holder) else None

    def hold(self, request: Request, holder: Request) -> None:
        """Record that a request waits for a holder."""
        self._times[request] = self._times.get(request, 0) + 1
        self._waits_for[request] = holder
        self._held.setdefault(holder, {})[request] = None

    def start(self, request: Request) -> None:
        """Record that a request that has adopted its cached prefix starts to compute the rest."""
        key = self._key(request, len(request.tokens))
        if key is not None:
            self._holders[key] = request
            self._prefixes[request] = key, request.num_cached

    def forget(self, request: Request) -> list[Request]:
        """Record that a request stops running or waiting; returns the requests that waited for it."""
        self._times.pop(request, None)
        if (holder := self._waits_for.pop(request, None)) is not None:
            del self._held[holder][request]
        key, _ = self._prefixes.pop(request, (None, 0))
        if self._holders.get(key) is request:
            del self._holders[key]
        return self._release(request)

    def share(self) -> list[Request]:
        """Put validated prefixes that others wait for into the prefix cache; returns the requests that waited."""
        if not self._held:
            return []
        released = []
        for holder in [holder for holder in self._held if self._is_shared(holder)]:
            self._kv.share(holder)
            released += self._release(holder)
        return released

    def num_waiting_for(self, plan: StepPlan) -> int:
        """How many requests wait for a holder that samples a token in this step."""
        return sum(len(waiting) for holder, waiting in self._held.items() if plan.chunks.get(holder) == holder.num_remaining)

    def _release(self, holder: Request) -> list[Request]:
        released = list(self._held.pop(holder, ()))
        for request in released:
            del self._waits_for[request]
        return released

    def _key(self, request: Request, end: int) -> Hashable:
        """Identifies the prefix that a request computes next; None if fewer than `min_tokens` are left before `end`."""
        start = request.num_cached
        if not self._length or start + self._length > end:
            return None
        # An empty match has no node of its own.
        where = request.lock if start else request.prefix_key
        return where, start, tuple(request.tokens[start : start + self._length])

    def _is_shared(self, holder: Request) -> bool:
        """Whether finite logits have validated some of what the holder computed since it was admitted."""
        return holder.num_validated > self._prefixes[holder][1]

    def _will_keep_state_for(self, request: Request, holder: Request) -> bool:
        """Whether the holder keeps its state far enough into the common prefix. If it still can, it will keep one at the end of that,
        unless there is already one nearby that some request needs."""
        size = self._kv.page_size
        common = num_common(request.tokens[: request.num_reusable], holder.tokens, request.num_cached) // size * size
        kept = [point for point in (*holder.snapshots, *holder.snapshot_points) if point <= common]
        asked_for = [point for point in kept if point not in holder.spare_points]
        if common - max([request.num_cached, *asked_for]) >= self._length and common > holder.num_cached:
            if common not in holder.snapshot_points:
                insort(holder.snapshot_points, common)
            holder.spare_points.discard(common)
            return True
        return max([request.num_cached, *kept]) - request.num_cached >= self._length
