"""Continuous batching: requests come and go while steps run."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from paged_attn.attn_ops.batch import BatchRequest
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.state_pool import StatePool
from paged_attn.capture.recorder import Recorder
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.detokenizer import IncrementalDetokenizer
from paged_attn.engine.kv_manager import KVManager
from paged_attn.engine.make_steps import make_runner, ready_to_step
from paged_attn.engine.model_limits import ModelLimits, num_state_slots, pool_pages
from paged_attn.engine.request import FinishReason, Request, TokenEvent
from paged_attn.engine.sampler import NonFiniteLogitsError, SampledToken, SamplingState, sample
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.engine.scheduler import Scheduled, Scheduler
from paged_attn.engine.step_runner import StepOutput
from paged_attn.recurrent.run import RecurrentRunner

logger = logging.getLogger("paged_attn")


@dataclass
class EngineStats:
    """Counters since the engine was made; seconds are wall time."""

    steps: int = 0
    model_seconds: float = 0.0
    host_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0


class Engine:
    """A model, a KV pool and a scheduler. Not thread-safe: one thread adds, cancels and steps (`LLM` adds a lock).

    Args:
        model: a Hugging Face causal LM, or any module with forward(input_ids, position_ids); it is left as it was found.
        tokenizer: decodes new tokens to text; None gives empty texts.
        recorder: captures graphs; by default CUDA graphs on a GPU and none elsewhere.

    Raises:
        UnsupportedError: see `ModelRunner` and `PatchedRunner`; or no backend runs its layers; or the pool can not hold two pages.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any = None, config: EngineConfig | None = None, recorder: Recorder | None = None
    ) -> None:
        self.config = config or EngineConfig.from_environment()
        self.tokenizer = tokenizer
        started = time.perf_counter()
        self.runner = make_runner(model, self.config)
        traced = time.perf_counter()
        self.limits = ModelLimits.of(model, self.runner.max_positions)
        if (rows := self.runner.max_rows) is not None and rows < self.config.max_batch_tokens:
            self.config = self.config.with_(max_batch_tokens=rows)
        device, layers = self.runner.device, self.runner.layers
        recurrent = [layer.spec for layer in self.runner.recurrent]
        slots = num_state_slots(self.config, recurrent, device, all(layer.chunks for layer in self.runner.recurrent))
        self.states = StatePool(recurrent, slots.total, device) if recurrent else None
        states = RecurrentRunner(self.runner.recurrent, self.states) if self.states else None
        state_bytes = self.states.nbytes if self.states else 0

        def num_pages(kept_free: int) -> int:
            return pool_pages(self.config, layers, self.runner.dtype, device, state_bytes, kept_free)

        self.steps, self.pool, self.selection = ready_to_step(self.runner, self.config, num_pages, states, recorder)
        if self.states and self.config.prefix_cache and not slots.snapshots:
            logger.info("no prefix is reused: its KV is of no use without the recurrent state at its end (see state_snapshots)")
        self.kv = KVManager(self.pool.num_pages, self.config.page_size, self.config.prefix_cache, slots, self.states)
        self.scheduler = Scheduler(self.config, self.kv)
        self.requests: dict[str, Request] = {}
        self.stats = EngineStats()
        self.start_seconds = {"model": traced - started, "graphs and pool": time.perf_counter() - traced}
        self._arrivals = itertools.count()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        namespace: Hashable = None,
        prompt: str | None = None,
    ) -> Request:
        """Queue a request; `step` will run it.

        Args:
            namespace: requests share cached prefixes only within one (adapter, tenant, salt).

        Raises:
            ValueError: an empty prompt, a token id out of range, a prompt beyond the model's positions, or an id in use.
            TypeError: a prompt that is not token ids, or a namespace that does not hash.
            UnsupportedError: the pool can never hold prompt and new tokens; the message does the sum.
        """
        params = SamplingParams() if params is None else params
        hash(namespace)
        arrival = next(self._arrivals)
        request_id = request_id if request_id is not None else f"request-{arrival}"
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request; choose another or cancel that one")
        ids = self.limits.checked_prompt(prompt_token_ids)
        max_new = self.limits.allowed_new_tokens(len(ids), params.max_new_tokens)
        self._check_fits(len(ids), max_new)
        stop = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.limits.eos_token_ids)
        request = Request(
            id=request_id, prompt_token_ids=ids, params=params, stop_token_ids=stop, max_new_tokens=max_new,
            sampling=SamplingState(params), detokenizer=IncrementalDetokenizer(self.tokenizer, params.stop),
            arrival=arrival, namespace=namespace, prompt=prompt, tokens=list(ids),
        )  # fmt: skip
        request.sampling.observe(ids)
        self.requests[request_id] = request
        self.scheduler.waiting.append(request)
        return request

    def cancel(self, request_id: str) -> bool:
        """End a request now and free all that it holds; False if it is unknown or has finished."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.CANCELLED)
        return True

    def step(self) -> list[TokenEvent]:
        """Run one batch; returns an event per new token, and one without a token for requests that end without one.

        An exception from the model leaves every request as it was before the step.
        """
        started = time.perf_counter()
        events = [self._finish(r, FinishReason.LENGTH) for r in list(self.scheduler.waiting) if r.max_new_tokens == 0]
        if events:
            return events  # at once: an exception below would lose them
        scheduled = self.scheduler.schedule()
        if not scheduled:
            assert not self.requests, f"nothing to schedule for {len(self.requests)} requests: {self.kv.num_available} pages are available"
            return []
        step = self.steps.prepare([self._share_of(s) for s in scheduled])
        with self._restarting_on_error([s.request for s in scheduled]) as unfinished:
            before_model = time.perf_counter()
            output = self.steps.run(step)
            after_model = time.perf_counter()
            sampling = [s.request for s in scheduled if s.samples]
            tokens = self._sample(output, sampling) if sampling else []
            chosen = iter(tokens)
            for s in scheduled:  # one by one: an exception must not leave a request computed to its end, but without its next token
                samples = s.samples
                s.request.num_cached += s.count
                unfinished.remove(s.request)
                self.kv.keep_state(s.request)
                self.stats.prompt_tokens += s.count if not s.request.sampled else 0
                if samples:
                    token = next(chosen)
                    events.append(self._accept(s.request, token) if isinstance(token, SampledToken) else self._fail(s.request, token))
        self.stats.steps += 1
        self.stats.model_seconds += after_model - before_model
        self.stats.host_seconds += before_model - started + time.perf_counter() - after_model
        return events

    def close(self) -> None:
        """Cancel everything, give the prefix cache's pages back and free all graphs; later steps would run uncaptured."""
        for request_id in list(self.requests):
            self.cancel(request_id)
        if self.kv.tree is not None:
            self.kv.tree.clear()
        self.steps.close()
        self.runner.close()

    @contextmanager
    def _restarting_on_error(self, requests: list[Request]) -> Iterator[list[Request]]:
        """Yields `requests`; those left in it when an error comes are computed anew, if they have recurrent state: unlike KV, which the
        next try writes over, a state that has advanced can not be taken back."""
        try:
            yield requests
        except BaseException:
            for request in requests if self.states is not None else []:
                request.num_vouched = 0  # its state may be ahead of it
                self.scheduler.preempt(request)
            raise

    def _share_of(self, scheduled: Scheduled) -> BatchRequest:
        request, start = scheduled.request, scheduled.request.num_cached
        tokens = request.tokens[start : start + scheduled.count]
        return BatchRequest(tokens, request.pages, start, int(scheduled.samples), request.state_slot)

    def _sample(self, output: StepOutput, requests: list[Request]) -> list[SampledToken | NonFiniteLogitsError]:
        """A token for each request; for rows that are not finite the error, while the others go on."""
        try:
            return list(sample(output.logits, [r.sampling for r in requests], output.tail))
        except NonFiniteLogitsError as error:
            bad = set(error.rows)
            good = [i for i in range(len(requests)) if i not in bad]
            tokens = iter(sample(output.logits[good], [requests[i].sampling for i in good]) if good else [])
            return [error if i in bad else next(tokens) for i in range(len(requests))]

    def _accept(self, request: Request, token: SampledToken) -> TokenEvent:
        request.num_vouched = request.num_cached
        if not request.sampled:
            self.stats.cached_tokens += request.cached_tokens
        if not request.sampled or request.snapshots:
            self.kv.share(request)  # others that wait with the same prompt can use it from the next step on
        request.tokens.append(token.token_id)
        request.sampled.append(token)
        request.sampling.observe([token.token_id])
        self.stats.new_tokens += 1
        text = request.detokenizer.append(token.token_id)
        reason: FinishReason | None = None
        if request.detokenizer.stopped is not None:
            reason, request.stop_reason = FinishReason.STOP, request.detokenizer.stopped
        elif token.token_id in request.stop_token_ids:
            reason, request.stop_reason = FinishReason.STOP, token.token_id
        elif len(request.sampled) >= request.max_new_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            text += self._finish(request, reason).text
        return TokenEvent(request.id, token.token_id, text, reason, token.logprob, token.top_logprobs)

    def _fail(self, request: Request, error: NonFiniteLogitsError) -> TokenEvent:
        request.error = ValueError(
            f"the model gave NaN or infinite logits for request {request.id!r} after {len(request.tokens)} tokens; the request ended, "
            "others go on. Check the weights, or run the model in bfloat16 or float32 if it is in float16."
        )
        request.error.__cause__ = error
        return self._finish(request, FinishReason.ERROR)

    def _finish(self, request: Request, reason: FinishReason) -> TokenEvent:
        request.finish_reason = reason
        text = request.detokenizer.finish() if request.detokenizer.stopped is None else ""
        self.scheduler.remove(request, share=bool(request.sampled) and reason is not FinishReason.ERROR)
        del self.requests[request.id]
        return TokenEvent(request.id, None, text, reason)

    def _check_fits(self, prompt: int, new: int) -> None:
        # The last new token is sampled but never attended to, so that its KV needs no slot.
        total, size = prompt + max(new - 1, 0), self.config.page_size
        needed = -(-total // size)
        if needed > self.kv.num_usable:
            raise UnsupportedError(
                f"this request can never fit: {prompt} prompt + {new} new tokens hold {total} tokens of KV = {needed} pages of {size}, "
                f"but the pool has {self.kv.num_usable} usable pages (= {self.kv.num_usable * size} tokens). "
                "Lower max_new_tokens, shorten the prompt, or raise num_pages or kv_memory_gib."
            )
