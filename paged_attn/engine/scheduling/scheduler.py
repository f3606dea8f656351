"""Which tokens of which requests the next step computes: decodes first, then prefill chunks, then new requests."""

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

HELD_PER_STEP = 32  # requests that one step sets aside at most, so that a flood of equal prompts does not hold it up


@dataclass
class SchedulerStats:
    """Counters since the engine was created.

    Attributes:
        admitted: requests that began to run, each once.
        queue_seconds, longest_queue_seconds: wall time that admitted requests had waited: the sum, and the longest.
        prompt_tokens: tokens in the prompts of admitted requests.
        prompt_tokens_cached: how many of them came from the prefix cache.
        prompt_tokens_without_state: how many more the prefix cache had, but without a recurrent state to start from.
        preemptions: how often a running request lost its pages and went back to the queue.
        held_back: how often a request had to wait for another one that computes the same prefix.
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
    """Admits requests by priority, then tenants and their namespaces in turn, then by the policy, under a token budget per step (chunked
    prefill, mixed with decodes).

    When pages run out, the least urgent running request (the newest of these) is preempted: its pages are freed (full ones go to the
    prefix cache), and it is recomputed from prompt and output, before new requests of its priority, so that its tokens stay the same.
    A request is also preempted to admit a more urgent one. One that has outgrown its cached keys (`Request.length_border`) is
    recomputed likewise. No decision depends on the time: equal calls give equal steps.

    Args:
        score_rows: most tokens of scored prompts in a step; each has a row of logits.
        whole_prompts: no prompt is cut into chunks; none is longer than a step.
        outgrow: requests may outgrow their cached keys.

    Attributes:
        wants_drain: the next `schedule` can do more if all steps are collected before it.
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
        self._blocked: tuple[Request, int] | None = None  # the request that found too few pages, and `kv.version` then
        self._looks_since = 0  # how often it was that one's turn since then

    def schedule(self, drained: bool = True) -> ScheduledStep:
        """Plan the next step and reserve its pages: decodes first (grouped by shared prefix), then chunks, then new requests.

        New requests that are more urgent than a running prompt come before its next chunk.

        Args:
            drained: no launched step is still to be collected. If one is, nothing is preempted: requests without pages are left out and
                `wants_drain` is set.
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
            if plan.budget <= 0 or request not in self.running:  # an earlier one may have preempted it
                continue
            if self._must_wait_whole(request, plan):
                break
            count = self._chunk_length(request, plan)
            if count and self._reserve_or_preempt(request, request.num_cached + count, plan, drained):
                plan.add_chunk(request, count)
        self._admit(plan, drained)
        # A step of few decodes costs as much as one with those that could join it once this step's tokens are there.
        if self._prefills.num_waiting_for(plan) > len(plan.decodes):
            self.wants_drain = True
        plan.decodes = self.running.by_prefix(plan.decodes)
        return plan.scheduled()

    def _recompute_outgrown(self, drained: bool) -> bool:
        """Put running requests that have outgrown what they have cached back into the queue, to be recomputed; True: steps in flight must
        be collected first, and nothing is scheduled."""
        requests, indices = self.running.in_order()
        rows = self.running.rows
        tokens = rows.num_tokens[indices]
        outgrown = (tokens > rows.length_border[indices]) & (tokens < rows.token_limit[indices])
        if outgrown.any() and not drained:
            self.wants_drain = True
            return True
        for index in outgrown.nonzero()[0].tolist():
            self._wait_again(requests[index])
        return False

    def _add_decodes(self, plan: StepPlan, drained: bool) -> list[Request]:
        """Plan the running requests that need one token; returns those that need more. Only the exceptions are looked at one by one."""
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

    def _must_wait_whole(self, request: Request, plan: StepPlan) -> bool:
        """Whether its tokens may not be cut into chunks, and this step has no room for all of them."""
        return self.whole_prompts and request.num_remaining > plan.budget

    @staticmethod
    def _chunk_length(request: Request, plan: StepPlan) -> int:
        """As many tokens as there are left, and as the budgets allow."""
        return min(request.num_remaining, plan.budget, max(request.scores_from - request.num_cached, 0) + plan.score_budget)

    def _reserve_or_preempt(self, request: Request, num_tokens: int, plan: StepPlan, drained: bool) -> bool:
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
        """Let in those that wait, in their order, as long as there is room.

        Args:
            above: only those that are more urgent than this priority.
        """
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
            if self._must_wait_whole(request, plan):
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
        """Whether it was short of pages and none came. What running requests free as they go on is looked for once in `page_size` steps:
        hardly more comes in fewer, and to count it takes as long as many requests run."""
        if self._blocked != (request, self.kv.version):
            return False
        self._looks_since += 1
        return not self.kv.frees_as_it_runs or self._looks_since < self.kv.page_size

    def _hold_back(self, request: Request, holder: Request) -> None:
        self.kv.release(request, share=False)
        self.waiting.set_aside(request)
        self._prefills.hold(request, holder)
        self.stats.held_back += 1

    def _start(self, request: Request, plan: StepPlan) -> None:
        """Let a request run that has adopted its prefix and whose tokens fit."""
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
        """As few less urgent requests, the last first, as give one that has adopted its prefix a place and what it is short of; none if all
        of them do not."""
        less_urgent = list(takewhile(lambda running: running.priority > request.priority, self.running.from_last()))
        if not less_urgent or self.kv.gain(less_urgent) < short:
            return ()
        fewer = range(1, len(less_urgent))
        return less_urgent[: 1 + bisect_left(fewer, short, key=lambda count: self.kv.gain(less_urgent[:count]))]

    def _preempt_for(self, request: Request, victims: Sequence[Request], plan: StepPlan, drained: bool) -> bool:
        """Preempt them; False, and none is, if there are none, or it cannot be now."""
        if not victims:
            self._blocked, self._looks_since = (request, self.kv.version), 0
            return False
        if not drained:
            self.wants_drain = True
            return False
        with self.kv.states.leaving_none(victims):  # snapshots would take the slots that they free
            for victim in victims:
                plan.drop(victim)
                self.preempt(victim)
        return True

    def preempt(self, request: Request) -> None:
        """Take a running request's pages and queue it again, before new ones of its priority; all its tokens must be known."""
        assert not request.num_pending, f"request {request.id!r} has a token under way: collect the step before preempting it"
        self._wait_again(request)
        self.stats.preemptions += 1

    def _wait_again(self, request: Request) -> None:
        self._stop(request, share=request.num_sampled > 0)
        request.take_length()
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
