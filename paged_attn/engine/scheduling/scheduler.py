"""Decides which tokens of which requests the next step computes: decodes first, then prefill chunks, then new requests."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from paged_attn.engine.config import EngineConfig
from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.requests.request import NO_SCORES, Request
from paged_attn.engine.scheduling.queue_policy import policy_maker
from paged_attn.engine.scheduling.running_set import RunningSet
from paged_attn.engine.scheduling.shared_prefills import SharedPrefills
from paged_attn.engine.scheduling.step_plan import ScheduledStep, StepPlan
from paged_attn.engine.scheduling.waiting_queue import WaitingQueue

HELD_PER_STEP = 32  # most requests that one step sets aside, so that a flood of equal prompts does not delay it


@dataclass
class SchedulerStats:
    """Counters since the engine was created.

    Attributes:
        admitted: requests that started to run, each counted once.
        queue_seconds, longest_queue_seconds: wall time that admitted requests waited: the sum, and the longest.
        prompt_tokens: tokens in the prompts of admitted requests.
        prompt_tokens_cached: how many of those came from the prefix cache.
        prompt_tokens_without_state: how many more the prefix cache had, but without a recurrent state to start from.
        preemptions: how often a running request lost its pages and went back to the queue.
        held_back: how often a request had to wait for another one that was computing the same prefix.
    """

    admitted: int = 0
    queue_seconds: float = 0.0
    longest_queue_seconds: float = 0.0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_without_state: int = 0
    preemptions: int = 0
    held_back: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that came from the prefix cache; 0 before any prompt."""
        return self.prompt_tokens_cached / self.prompt_tokens if self.prompt_tokens else 0.0

    def count_admission(self, waited: float, prompt_tokens: int, cached: int, without_state: int) -> None:
        self.admitted += 1
        self.queue_seconds += waited
        self.longest_queue_seconds = max(self.longest_queue_seconds, waited)
        self.prompt_tokens += prompt_tokens
        self.prompt_tokens_cached += cached
        self.prompt_tokens_without_state += without_state


class Scheduler:
    """Plans steps under a token budget: chunked prefill, mixed with decodes.

    Requests are admitted by priority; within one, tenants take turns, and so do a tenant's namespaces; among the rest the policy decides.

    When pages run out, the least urgent running request is preempted, the newest of them. Its pages are freed (full ones go to the prefix
    cache). It is admitted again before new requests of its priority and recomputed from prompt and output, so its tokens stay the same.
    A request is also preempted to admit a more urgent one. A request that has outgrown its cached keys (`Request.length_border`) is
    recomputed in the same way. No decision depends on the time: equal calls give equal steps.

    Args:
        score_rows: most tokens of scored prompts in a step; each needs a row of logits.
        whole_prompts: no prompt is split into chunks; none is longer than a step.
        outgrow: requests may outgrow their cached keys.

    Attributes:
        wants_drain: the next `schedule` can do more if all steps in flight are collected first.
    """

    def __init__(
        self, config: EngineConfig, kv: KVManager, score_rows: int = NO_SCORES, whole_prompts: bool = False, outgrow: bool = False
    ) -> None:
        self.config, self.kv, self.score_rows, self.whole_prompts, self.outgrow = config, kv, score_rows, whole_prompts, outgrow
        self.waiting = WaitingQueue(policy_maker(config.policy, kv))
        self.running = RunningSet(config.max_requests)
        self.stats = SchedulerStats()
        self.wants_drain = False
        self._prefills = SharedPrefills(kv, config.prefix_wait_tokens)
        self._blocked: tuple[Request, int] | None = None  # the request that found too few pages, and `kv.version` at that time
        self._turns_since_blocked = 0

    def schedule(self, drained: bool = True) -> ScheduledStep:
        """Plan the next step and reserve its pages: decodes first (grouped by shared prefix), then chunks, then new requests.

        New requests that are more urgent than a running prompt come before its next chunk.

        Args:
            drained: no step is in flight. Otherwise nothing is preempted: requests without pages are left out and `wants_drain` is set.
        """
        self.wants_drain = False
        for request in self._prefills.share():
            self.waiting.bring_back(request)
        plan = StepPlan(self.config.step_tokens, self.score_rows)
        if self.outgrow and self._recompute_outgrown(drained):
            return plan.scheduled()
        for request in self._add_decodes(plan, drained):
            if plan.budget <= 0:
                break
            if (urgency := self.waiting.urgency) is not None and urgency < request.priority:
                self._admit(plan, drained, request.priority)
            if plan.budget <= 0 or request not in self.running:  # an earlier request may have preempted it
                continue
            if self._lacks_room_for_whole(request, plan):
                break
            count = self._chunk_length(request, plan)
            if count and self._reserve_or_preempt(request, request.num_cached + count, plan, drained):
                plan.add_chunk(request, count)
        self._admit(plan, drained)
        # A step of few decodes costs as much as one with the requests that can join it once this step's tokens are known.
        if self._prefills.num_waiting_for(plan) > len(plan.decodes):
            self.wants_drain = True
        plan.decodes = self.running.by_prefix(plan.decodes)
        return plan.scheduled()

    def _recompute_outgrown(self, drained: bool) -> bool:
        """Requeue running requests that have outgrown their cached keys, to be recomputed. True: steps in flight must be collected first,
        and nothing is scheduled."""
        requests, indices = self.running.in_order()
        rows = self.running.rows
        tokens = rows.num_tokens[indices]
        outgrown = (tokens > rows.length_border[indices]) & (tokens < rows.token_limit[indices])
        if outgrown.any() and not drained:
            self.wants_drain = True
            return True
        for index in outgrown.nonzero()[0].tolist():
            self._requeue(requests[index])
        return False

    def _add_decodes(self, plan: StepPlan, drained: bool) -> list[Request]:
        """Plan the running requests that need one token; returns those that need more. Only exceptions are handled one by one."""
        if not self.running:
            return []
        requests, indices = self.running.in_order()
        rows = self.running.rows
        cached, tokens = rows.num_cached[indices], rows.num_tokens[indices]
        needs_one = tokens - cached == 1
        may_decode = needs_one & (tokens < rows.token_limit[indices])  # the last token may not be known yet
        lacks_page = cached >= rows.num_pages[indices] * self.kv.page_size
        left_out = {requests[index] for index in (~may_decode).nonzero()[0].tolist()}
        lacking = (may_decode & lacks_page).nonzero()[0]
        if len(lacking) and not self.kv.add_page_each(rows, indices[lacking]):
            for index in lacking.tolist():
                request = requests[index]
                if request in self.running and not self._reserve_or_preempt(request, request.num_cached + 1, plan, drained):
                    left_out.add(request)
        plan.add_decodes(self.running.without(left_out))
        prefilling = [requests[index] for index in (~needs_one).nonzero()[0].tolist()] if left_out else []
        return [request for request in prefilling if request in self.running]  # a decode may have preempted it

    def _lacks_room_for_whole(self, request: Request, plan: StepPlan) -> bool:
        """Whether prompts may not be split into chunks and this step has too little room for the whole one."""
        return self.whole_prompts and request.num_remaining > plan.budget

    @staticmethod
    def _chunk_length(request: Request, plan: StepPlan) -> int:
        """As many of the remaining tokens as the budgets allow."""
        return min(request.num_remaining, plan.budget, max(request.scores_from - request.num_cached, 0) + plan.score_budget)

    def _reserve_or_preempt(self, request: Request, num_tokens: int, plan: StepPlan, drained: bool) -> bool:
        """Reserve pages for a request's first `num_tokens` tokens. While there are too few, preempt the last running request.

        False, if it was this one; or if a step is in flight, where nothing is preempted and `wants_drain` is set.
        """
        while not self.kv.reserve(request, num_tokens):
            if not drained:
                self.wants_drain = True
                return False
            last = self.running.last
            plan.drop(last)
            self.preempt(last)
            if last is request:
                return False
        return True

    def _admit(self, plan: StepPlan, drained: bool, above: int | None = None) -> None:
        """Admit waiting requests in order, as long as there is room. `above`: only requests that are more urgent than this priority."""
        held = 0
        while plan.budget > 0 and not self.wants_drain and held < HELD_PER_STEP:
            urgency = self.waiting.urgency
            if urgency is None or (above is not None and urgency >= above):
                return
            has_room = len(self.running) < self.config.max_requests and self.kv.states.can_admit
            if not has_room and self.running.last.priority <= urgency:
                return
            request = self.waiting.next()
            assert request is not None
            if request.num_pending:
                self.wants_drain = True
                return
            if request.wants_scores and plan.score_budget <= 0:
                return
            if self._lacks_room_for_whole(request, plan):
                return
            if self._is_still_blocked(request):
                return
            self.kv.adopt_prefix(request)
            if (holder := self._prefills.holder_for(request)) is not None:
                self._hold_back(request, holder)
                held += 1
                continue
            short = self.kv.shortfall(request)
            if has_room and short <= 0:
                self._start(request, plan)
                continue
            victims = self._victims(request, short)
            self.kv.release(request, share=False)
            if not self._preempt_for(request, victims, plan, drained):
                return

    def _is_still_blocked(self, request: Request) -> bool:
        """Whether it found too few pages and none have been released since. Pages that requests free while they run are counted only once
        in `page_size` turns: they hardly free more in fewer steps, and counting takes time in proportion to the running requests."""
        if self._blocked != (request, self.kv.version):
            return False
        self._turns_since_blocked += 1
        return not self.kv.frees_as_it_runs or self._turns_since_blocked < self.kv.page_size

    def _hold_back(self, request: Request, holder: Request) -> None:
        self.kv.release(request, share=False)
        self.waiting.set_aside(request)
        self._prefills.hold(request, holder)
        self.stats.held_back += 1

    def _start(self, request: Request, plan: StepPlan) -> None:
        """Start a request that has adopted its prefix and whose tokens fit."""
        count = self._chunk_length(request, plan)
        reserved = self.kv.reserve(request, request.num_cached + count)
        assert reserved, f"{count} tokens of {request.id!r} found no pages, though all of its tokens fitted"
        self.kv.states.take_slot(request)
        waited = self.waiting.take(request)
        if waited is not None:
            request.began_at = time.perf_counter()
            self.stats.count_admission(waited, len(request.tokens), request.num_cached, request.tokens_without_state)
        if not request.num_sampled:
            request.cached_tokens = request.num_cached
        self._prefills.start(request)
        self.running.add(request)
        plan.add_chunk(request, count)

    def _victims(self, request: Request, short: int) -> Sequence[Request]:
        """The fewest less urgent requests, last first, whose preemption makes room for a request that has adopted its prefix; none if
        preempting all of them is not enough."""
        less_urgent = list(takewhile(lambda running: running.priority > request.priority, self.running.from_last()))
        if not less_urgent or self.kv.freed_by(less_urgent) < short:
            return ()
        fewer = range(1, len(less_urgent))
        return less_urgent[: 1 + bisect_left(fewer, short, key=lambda count: self.kv.freed_by(less_urgent[:count]))]

    def _preempt_for(self, request: Request, victims: Sequence[Request], plan: StepPlan, drained: bool) -> bool:
        """Preempt all victims; False, with nothing preempted, if there are none or a step is in flight."""
        if not victims:
            self._blocked, self._turns_since_blocked = (request, self.kv.version), 0
            return False
        if not drained:
            self.wants_drain = True
            return False
        with self.kv.states.without_sharing_last(victims):  # snapshots would take the slots that they free
            for victim in victims:
                plan.drop(victim)
                self.preempt(victim)
        return True

    def preempt(self, request: Request) -> None:
        """Free a running request's pages and requeue it before new requests of its priority; the host must know all of its tokens."""
        assert not request.num_pending, f"request {request.id!r} has a pending token: collect the step before preempting it"
        self._requeue(request)
        self.stats.preemptions += 1

    def _requeue(self, request: Request) -> None:
        """Stop a running request: its full pages go to the prefix cache, and it waits before new requests of its priority."""
        self._stop(request, share=request.num_sampled > 0)
        request.set_length_border()
        self.running.remove(request)
        self.waiting.append(request, ran_before=True)

    def remove(self, request: Request, *, share: bool) -> None:
        """Forget a request, running or waiting, and free what it holds."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._stop(request, share=share)

    def _stop(self, request: Request, share: bool) -> None:
        self.kv.release(request, share=share)
        for waiting in self._prefills.forget(request):
            self.waiting.bring_back(waiting)
