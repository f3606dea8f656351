"""Continuous batching: requests come and go while steps run."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.batch.batch import RequestColumns
from paged_attn.attn_ops.current_device import current_device, on_its_device
from paged_attn.attn_ops.errors import ContextError, UnsupportedError
from paged_attn.calling.plain_modes import in_plain_modes
from paged_attn.calling.uncompiled import uncompiled
from paged_attn.capture.graphs.recorder import Recorder
from paged_attn.engine.build_runtime import Runtime, build_runtime
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.input_processor import InputProcessor
from paged_attn.engine.lora.lora_pool import LoraPool
from paged_attn.engine.output_processor import OutputProcessor
from paged_attn.engine.pooling.pooler import Pooler
from paged_attn.engine.requests.outputs import FinishReason, TokenEvents
from paged_attn.engine.requests.pooled_rows import PooledRows, PoolingParams
from paged_attn.engine.requests.request import NO_SCORES, Request
from paged_attn.engine.runners.model_watch import STEPS_BETWEEN, ModelWatch, model_changed
from paged_attn.engine.sampling.sampler import Sampler
from paged_attn.engine.sampling.sampler_output import PromptScores, score_rows
from paged_attn.engine.sampling_params import INTO_PARAMS, SamplingParams
from paged_attn.engine.scheduling.scheduler import Scheduler
from paged_attn.engine.setting_names import tells_names
from paged_attn.engine.steps.in_flight import InFlightStep
from paged_attn.engine.steps.step_layout import NONE_IN_FLIGHT, StepLayout, build_step
from paged_attn.engine.steps.step_runner import Step, StepRunner
from paged_attn.interrupts import held_back, uninterrupted
from paged_attn.passes.fx.model_facts import model_device
from paged_attn.shown import shown
from paged_attn.stopwatch import stopwatch

logger = logging.getLogger("paged_attn")


class Engine:
    """A model, a KV pool and a scheduler. Not thread-safe: one thread adds, cancels and steps (`LLM` adds a lock).

    Args:
        model: a Hugging Face causal LM, or any module with forward(input_ids, position_ids); it is not changed. For a
            compiled model, the model inside is used. With a `Pooler`, the engine embeds texts and does not generate.
        tokenizer: decodes new tokens to text; None gives empty texts.
        recorder: captures graphs; by default CUDA graphs on a GPU and none elsewhere.

    Attributes:
        pooler: set for an engine that embeds; None for one that generates.
        budget: how memory was divided over pages and recurrent states.
        is_causal: no token sees later ones. Otherwise each prompt is computed whole, in one step, and no prefix is cached.
        overlaps: a step is launched before the previous step's tokens are known.
        limits: the model's; default_params: values of params that a request does not set.
        requests: those that have not finished, by id.
        stats: counters since the engine was created or they were `reset`.
        last_scheduled: the requests of the last step that `step` launched or tried to launch.
        start_seconds: time to create this engine, by part.
        device: the model's; it is the current device whenever the engine computes.

    Raises:
        UnsupportedError: see `TracedRunner` and `HookedRunner`; or no backend runs its layers; or the pool cannot hold two pages.
    """

    recovers = True  # whether steps may follow one that raised

    @in_plain_modes
    def __init__(
        self, model: nn.Module | Pooler, tokenizer: Any = None, config: EngineConfig | None = None, recorder: Recorder | None = None
    ) -> None:
        self.pooler = model if isinstance(model, Pooler) else None
        model = model.body if isinstance(model, Pooler) else uncompiled(model)
        self.device = model_device(model)
        with stopwatch() as self.start_seconds, current_device(self.device):
            self._make_loop(build_runtime(model, config or EngineConfig.from_environment(), self.pooler, recorder), tokenizer)
        parts = (f"{seconds:.2f} s ({name})" for name, seconds in self.start_seconds.items() if seconds >= 0.005)
        logger.info("ready in %s", ", ".join(parts))

    def _make_loop(self, built: Runtime, tokenizer: Any) -> None:
        """Create what `step` uses, from input processor to output processor."""
        config, runner = self.config, self.runner = built.config, built.runner
        self.kv, self.pool, self.state_pool, self.budget = built.kv, built.pool, built.state_pool, built.budget
        self.step_runner, self.lora_step_runner, self.selection = built.step_runner, built.lora_step_runner, built.selection
        self.adapters, self.threads, self.is_causal = built.adapters, built.threads, built.is_causal
        self.tokenizer, self.limits, self.default_params = tokenizer, built.limits, built.defaults
        self.input_processor = InputProcessor(
            built.limits, self.kv.max_request_pages, config.page_size, tokenizer, self.state_pool is not None, built.defaults,
            None if self.is_causal else config.step_tokens,
        )  # fmt: skip
        width = runner.token_ids.chosen if self.pooler is None else self.pooler.body.width
        self.scheduler = Scheduler(
            config, self.kv, score_rows(width) if self.is_causal else NO_SCORES, not self.is_causal, bool(built.limits.length_borders)
        )
        self.overlaps = bool(config.overlap)
        self.sampler = Sampler(runner.ranks)
        self.output_processor = OutputProcessor(self.kv, self.scheduler, self.sampler)
        self.requests, self.stats = self.output_processor.requests, self.output_processor.stats
        self.last_scheduled: Sequence[Request] = ()
        self._in_flight: deque[InFlightStep] = deque()  # two at most, the oldest first
        self._wanting_no_token: list[Request] = []
        self._is_stepping, self._cancelled_in_step = False, list[str]()
        self._arrivals, self._step_numbers = itertools.count(), itertools.count(1)
        captured = self.step_runner.graphs is not None and bool(self.step_runner.graphs.captured)
        self.watch: ModelWatch | None = ModelWatch(runner, captured)
        self._steps_since_look, self._look_is_due, self._is_stale = 0, False, False
        self._released = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self.requests or self.output_processor.pending)

    @tells_names("Engine.add_request", INTO_PARAMS)
    @uninterrupted
    @in_plain_modes
    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | PoolingParams | None = None,
        *,
        request_id: str | None = None,
        namespace: Hashable = None,
        tenant: Hashable = None,
        prompt: str | None = None,
        priority: int = 0,
        text_at_end: bool = False,
        kept_tokens: frozenset[int] = frozenset(),
        lora: str | None = None,
    ) -> Request:
        """Queue a request; `step` will run it.

        Args:
            namespace: requests share cached prefixes only within a namespace; the adapter becomes part of it, the tenant does not.
            tenant: within a priority, tenants take turns, one request each, and so do a tenant's namespaces.
            priority: a lower value is more urgent: admitted first and preempted last.
            text_at_end: decode the text once, when the request ends, which is cheaper than token by token (ignored with stop strings).
            kept_tokens: special tokens that stay in the text.
            lora: the name of a loaded adapter; None: the model without an adapter.

        Raises:
            ValueError: a prompt that is empty, too long for the model, or has a token id out of range; a request id in use; an adapter
                that is not loaded; a schema, regular expression or grammar that cannot be read.
            TypeError: a prompt that is not token ids, an unhashable namespace or tenant, or a priority that is not an integer.
            UnsupportedError: the pool can never hold prompt and new tokens (the message shows the arithmetic), a guided answer needs a
                missing package, or the model has changed (`ModelWatch`).
            ContextError: the engine's memory was freed.
        """
        if self._released:
            raise ContextError("this LLM was closed, and the memory of its KV pages was given back; make another LLM")
        self._look_is_due = self._steps_since_look > 0
        if not self.requests:
            self.look_at_model()
        params = SamplingParams() if params is None else params
        if self.pooler is not None:
            self.pooler.check(prompt_token_ids, params)
        elif isinstance(params, PoolingParams):
            raise UnsupportedError(
                f"this engine of {type(self.runner.model).__name__} generates and has no embeddings; LLM(model, task='embed') embeds"
            )
        arrival = next(number for number in self._arrivals if request_id is not None or f"request-{number}" not in self.requests)
        request_id = request_id if request_id is not None else f"request-{arrival}"
        if request_id in self.requests:
            raise ValueError(f"request id {shown(request_id)} is in use by an unfinished request; choose another or cancel that one")
        adapter = None if lora is None else self._adapters().of(lora)
        request = self.input_processor.make(
            prompt_token_ids, params, arrival=arrival, request_id=request_id,
            namespace=namespace if adapter is None else adapter.namespace(namespace), tenant=tenant, prompt=prompt,
            priority=priority, text_at_end=text_at_end, kept_tokens=kept_tokens,
        )  # fmt: skip
        if adapter is not None:
            request.lora, request.adapter = adapter.name, adapter.slot + 1
        self.output_processor.add_request(request)
        if request.max_new_tokens or request.wants_scores or request.pooled is not None:
            self.scheduler.waiting.append(request)
        else:
            self._wanting_no_token.append(request)
        return request

    @uninterrupted
    def cancel(self, request_id: str) -> bool:
        """End a request and free everything it holds, at once or, if called from within a step, at the step's end. False if there is no
        such unfinished request."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if self._is_stepping:
            self._cancelled_in_step.append(request_id)
        else:
            self.output_processor.cancel(request)
        return True

    @uninterrupted
    @in_plain_modes
    @on_its_device
    def load_lora(self, name: str, source: Any) -> None:
        """See `LLM.load_lora`; running steps are not held up. Raises what `LoraPool.load` raises, or ValueError if max_loras is 0."""
        self._adapters().load(name, source)

    @uninterrupted
    def unload_lora(self, name: str) -> None:
        """See `LLM.unload_lora`; frees the adapter's slot."""
        adapter = self._adapters().of(name)
        if users := [request.id for request in self.requests.values() if request.lora == name]:
            raise ValueError(
                f"the adapter {name!r} is used by {len(users)} requests that have not finished ({users[0]} is one); wait for them, or "
                "cancel them"
            )
        self._adapters().unload(adapter.name)

    def _adapters(self) -> LoraPool:
        if self.adapters is None:
            raise ValueError("this engine has no room for adapters; make it with max_loras=8, or with loras={name: folder}")
        return self.adapters

    @uninterrupted
    @in_plain_modes
    @on_its_device
    def step(self) -> TokenEvents:
        """Launch one batch and wait for the previous one or, without overlap, for this one.

        Returns an event for each token that arrived, and one without a token for each request that ends without one; with overlap there
        may be none while there is work. If the model raises, no token is lost: requests continue with the next call, which also returns
        pending events; requests with recurrent state are recomputed. The same holds for Ctrl-C, which is raised from within the model or
        at the end of the step.

        Raises:
            RuntimeError: called from within a step, by a logits processor or a callback.
        """
        self.refuse_within_step()
        self._is_stepping = True
        try:
            return self._step()
        finally:
            self._is_stepping = False
            while self._cancelled_in_step:
                self.cancel(self._cancelled_in_step.pop())

    def refuse_within_step(self) -> None:
        """Raises RuntimeError: see `step`."""
        if self._is_stepping:
            raise RuntimeError(
                "a logits processor or a callback generates with the engine that is calling it, in the middle of a step; let it use the "
                "model's own generate, or another LLM"
            )

    def _step(self) -> TokenEvents:
        self._steps_since_look += 1
        is_due = self._look_is_due and self._steps_since_look > STEPS_BETWEEN
        if is_due or (self.watch is not None and self.watch.may_be_stale()):
            self.look_at_model()
        if self._is_stale:
            self._drop_stale_kv()
        while self._wanting_no_token:
            request = self._wanting_no_token.pop(0)
            if request.finish_reason is None:
                self.output_processor.end(request, FinishReason.LENGTH)
        self._collect(1 if self.overlaps and not self.scheduler.wants_drain else 0)
        launched = self._launch()
        self._collect(1 if launched and self.overlaps else 0)
        held_back.check()
        return self.take_due_events()

    @in_plain_modes
    @on_its_device
    def run_rows(self, columns: RequestColumns) -> Tensor:
        """Run one step of rows that belong to no request; returns a copy of their logits [sum(num_logits), vocabulary].

        The caller owns their pages and takes none from `kv`: an engine serves either requests or such rows. Not for models with recurrent
        state.
        """
        step = self.step_runner.prepare(columns)
        with self.threads.for_step(len(columns.tokens)) if self.threads is not None else nullcontext():
            return self.step_runner.run(step).logits.clone()

    @uninterrupted
    def clear_prefix_cache(self) -> int:
        """Forget all cached prefixes that no running request uses; returns how many pages that freed."""
        return self.kv.forget_prefixes()

    @uninterrupted
    @on_its_device
    def close(self) -> None:
        """Cancel all requests, empty the prefix cache and free all graphs; later steps would run uncaptured."""
        for request_id in list(self.requests):
            self.cancel(request_id)
        self._in_flight.clear()
        self.clear_prefix_cache()
        self.input_processor.guides.close()
        for step_runner in (self.step_runner, self.lora_step_runner):
            if step_runner is not None:
                step_runner.close()
        self.watch = None
        self.runner.close()

    @uninterrupted
    @on_its_device
    def release(self) -> None:
        """`close`, and free the memory of KV pages and states; no step may follow."""
        self.close()
        self._released = True
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)  # steps that were cancelled may still write there
        for pool in (self.pool, self.state_pool):
            if pool is not None:
                pool.release()
        if on_gpu:
            torch.cuda.empty_cache()  # the next engine sizes its pool by the memory that the driver reports as free

    @on_its_device
    def look_at_model(self) -> None:
        """Check whether the model has changed. Values written in place take effect from the next step on. Raises ModelChangedError: it is
        no longer the model that the engine runs."""
        if self.watch is not None:
            if self.pooler is not None and not self.pooler.has_its_body:
                raise model_changed(["its base_model was replaced"], "and the engine goes on with what was there before")
            self._is_stale |= self.watch.look()
            self._steps_since_look, self._look_is_due = 0, False

    def _drop_stale_kv(self) -> None:
        """After weights changed: running requests keep their tokens and recompute KV and states; the prefix cache is emptied."""
        self._collect(0)
        for request in list(self.scheduler.running.from_last()):
            self.scheduler.preempt(request)
        self.kv.forget_prefixes()
        self._is_stale = False

    def _launch(self) -> bool:
        """Start the next step, if there is one to run."""
        self.last_scheduled = ()
        scheduled = self.scheduler.schedule(drained=not self._in_flight)
        if not scheduled:
            assert self._in_flight or not self.requests, (
                f"nothing to schedule for {len(self.requests)} requests: {self.kv.num_available} pages are available"
            )
            return False
        running, requests = self.scheduler.running, scheduled.requests
        in_flight = self._in_flight[-1].number if self._in_flight else NONE_IN_FLIGHT
        checkpoints = self.kv.states.take_checkpoints(requests, scheduled.counts)
        layout, columns = build_step(
            scheduled, running.rows, running.indices(requests), in_flight, self.pooler is not None, checkpoints, self.kv.frames
        )
        self.last_scheduled = requests
        step_runner = self.step_runner
        if self.lora_step_runner is not None and columns.lora_slots is not None and columns.lora_slots.max() >= 0:
            step_runner = self.lora_step_runner
        step = step_runner.prepare(columns)
        try:
            self._run(step_runner, step, layout, len(columns.tokens))
        except BaseException:
            failed = self.last_scheduled  # this step's, or those of the one before, if its tokens did not come
            with self.kv.states.without_sharing_last(requests):
                try:
                    self._collect(0)  # earlier results are not lost
                finally:
                    self._reset_after_error([request for request in requests if request.finish_reason is None])
            self.last_scheduled = failed
            raise
        self.stats.steps += 1
        self.stats.prompt_tokens += layout.num_of_prompts
        return True

    def _run(self, step_runner: StepRunner, step: Step, layout: StepLayout, num_tokens: int) -> None:
        """Launch the model and the choice of tokens: if that needs the host, once the previous step's tokens are known, for which the host
        waits while the device runs the model."""
        before_model = time.perf_counter()
        own_writes = self.watch.own_writes() if self.watch is not None and step.captured is None else nullcontext()
        with own_writes, self.threads.for_step(num_tokens) if self.threads is not None else nullcontext():
            with held_back.let_through():
                output = step_runner.run(step)
            self.stats.model_seconds += time.perf_counter() - before_model
            scores = PromptScores(output.logits, [tokens for _, tokens in layout.scored]) if layout.scored else None
            pooled = PooledRows(output.logits, [part for _, part in layout.pooled]) if layout.pooled else None
            launched = InFlightStep(layout, next(self._step_numbers), scores, pooled)
            launched.begin()
            self._in_flight.append(launched)
            try:
                self.kv.states.keep(layout.requests)
                if len(self._in_flight) > 1 and any(state.needs_host for state in layout.states.values()):
                    self._collect(1)
                    self.last_scheduled = layout.requests
                launched.choose(self.sampler, output, self.step_runner.future_tokens)
            except BaseException:
                if launched in self._in_flight:  # otherwise it was taken back with the step before
                    self._in_flight.remove(launched)
                    launched.rollback()
                raise

    def _collect(self, keep: int) -> None:
        """Process the results of the oldest steps until `keep` steps are in flight, and results that an exception left unprocessed."""
        while self._in_flight and (len(self._in_flight) > keep or self._in_flight[0].has_arrived or not self.requests):
            if not self.requests:  # nobody waits for its results
                self._in_flight.clear()
                return
            started = time.perf_counter()
            in_flight = self._in_flight[0]
            self.last_scheduled = in_flight.requests
            try:
                in_flight.wait()
            except BaseException:
                lost = dict.fromkeys(request for late in reversed(self._in_flight) for request in late.rollback())
                self._in_flight.clear()
                self._reset_after_error(list(lost))  # by now none of them has a pending token
                raise
            finally:
                self.stats.model_seconds += time.perf_counter() - started
            self.output_processor.process(in_flight)
            self._in_flight.popleft()

    def _reset_after_error(self, requests: list[Request]) -> None:
        """Discard the device's token counts, which may be wrong, and recompute requests with recurrent state: the next try overwrites KV,
        but a state that has advanced cannot be rolled back."""
        with self.kv.states.without_sharing_last(requests):
            for request in requests:
                self.sampler.forget(request.sampling)
                if not self.kv.can_go_on(request):
                    self.scheduler.preempt(request)

    def take_due_events(self) -> TokenEvents:
        """Take the events that the next `step` would return first: tokens that arrived before a step failed."""
        return self.output_processor.take_pending()
