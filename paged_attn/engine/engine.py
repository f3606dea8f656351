"""Continuous batching: requests come and go while steps run."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.batch.batch import RequestColumns
from paged_attn.attn_ops.batch.host_copy import copy_to_device
from paged_attn.attn_ops.current_device import current_device, on_its_device
from paged_attn.attn_ops.errors import ContextError, UnsupportedError
from paged_attn.attn_ops.kv.layer_groups import group_layers
from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.backends.devices import has_triton
from paged_attn.calling.plain_modes import in_plain_modes
from paged_attn.calling.uncompiled import uncompiled
from paged_attn.capture.graphs.recorder import Recorder
from paged_attn.engine.build_runtime import fitted, lora_runner, make_runner, ready_to_step, refuse_for_pooling
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.generation_config import default_params
from paged_attn.engine.input_processor import InputProcessor
from paged_attn.engine.lora.lora_pool import LoraPool
from paged_attn.engine.memory.budget import MemoryBudget
from paged_attn.engine.memory.grouped_kv import make_kv_manager
from paged_attn.engine.model.model_limits import ModelLimits
from paged_attn.engine.output_processor import EngineStats, OutputProcessor
from paged_attn.engine.pooling.pooler import Pooler
from paged_attn.engine.requests.outputs import FinishReason
from paged_attn.engine.requests.pooled_rows import PooledRows
from paged_attn.engine.requests.pooling_params import PoolingParams
from paged_attn.engine.requests.request import NO_SCORES, Request
from paged_attn.engine.requests.token_events import TokenEvents
from paged_attn.engine.runners.model_watch import STEPS_BETWEEN, ModelWatch, model_changed
from paged_attn.engine.sampling.prompt_scores import PromptScores, score_rows
from paged_attn.engine.sampling.sampler import Sampler
from paged_attn.engine.sampling.sampler_output import SamplerOutput
from paged_attn.engine.sampling_params import INTO_PARAMS, SamplingParams
from paged_attn.engine.scheduling.scheduler import Scheduler
from paged_attn.engine.setting_names import tells_names
from paged_attn.engine.steps.in_flight import InFlightStep
from paged_attn.engine.steps.step_layout import NONE_IN_FLIGHT, StepLayout, build_step
from paged_attn.engine.steps.step_runner import StepOutput
from paged_attn.engine.steps.thread_choice import ThreadChoice, num_threads, num_threads_to_start
from paged_attn.interrupts import held_back, uninterrupted
from paged_attn.passes.fx.model_facts import model_device
from paged_attn.recurrent.run import RecurrentRunner
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
        last_scheduled: the requests of the last step that `step` launched or tried to.
        start_seconds: time to create this engine, by part.
        device: of the model; it is the current one whenever the engine computes.

    Raises:
        UnsupportedError: see `TracedRunner` and `HookedRunner`; or no backend runs its layers; or the pool cannot hold two pages.
    """

    recovers = True  # after a step that raised it is fit for others

    @in_plain_modes
    def __init__(
        self, model: nn.Module | Pooler, tokenizer: Any = None, config: EngineConfig | None = None, recorder: Recorder | None = None
    ) -> None:
        self.pooler = model if isinstance(model, Pooler) else None
        model = model.body if isinstance(model, Pooler) else uncompiled(model)
        self.device = model_device(model)
        with stopwatch() as self.start_seconds, current_device(self.device):
            self._start(model, tokenizer, config, recorder)
        parts = (f"{seconds:.2f} s ({name})" for name, seconds in self.start_seconds.items() if seconds >= 0.005)
        logger.info("ready in %s", ", ".join(parts))

    def _start(self, model: nn.Module, tokenizer: Any, config: EngineConfig | None, recorder: Recorder | None) -> None:
        cuda = self.device.type == "cuda"
        given = config or EngineConfig.from_environment()
        self.config = given.resolved(cuda=cuda, has_triton=cuda and has_triton())
        self.tokenizer = tokenizer
        to_start = num_threads_to_start(model)
        with num_threads(self.config.threads or to_start):
            self.runner = make_runner(model, self.config)
        if self.pooler is not None:
            refuse_for_pooling(self.runner, self.pooler, self.config)
        self.is_causal = all(spec.causal for spec in self.runner.layers if spec.by_backend)
        self.config = fitted(self.config, self.runner, self.is_causal, given.max_batch_tokens)
        limits = ModelLimits.of(model, self.runner.max_positions, self.runner.length_borders, self.runner.token_ids)
        limits = limits.within(self.config.max_model_len)
        defaults = default_params(model, limits.eos_token_ids) if self.config.generation_config == "auto" else SamplingParams()
        self._allocate(limits, recorder)
        self._make_loop(limits, defaults, to_start)

    def _allocate(self, limits: ModelLimits, recorder: Recorder | None) -> None:
        """Divide the memory, make the pools in it, and capture the steps that use them."""
        runner, config = self.runner, self.config
        recurrent = [layer.spec for layer in runner.recurrent]
        takes_chunks = all(layer.takes_chunks for layer in runner.recurrent)
        grouped = config.layer_groups and self.pooler is None
        groups = group_layers(runner.layers, limits.max_positions, config.page_size) if grouped else ()
        self.budget = MemoryBudget(
            config, runner.layers, runner.dtype, self.device, groups, recurrent, limits.max_positions, takes_chunks,
            int if runner.ranks is None else runner.ranks.least,
        )  # fmt: skip
        slots = self.budget.slots
        self.states = StatePool(recurrent, slots.total, self.device) if recurrent else None
        states = RecurrentRunner(runner.recurrent, self.states) if self.states else None
        with_adapters = lora_runner(runner, config)
        self.adapters = None if with_adapters is None else with_adapters.adapters
        self.steps, self.lora_steps, self.pool, self.selection = ready_to_step(
            runner, with_adapters, config, self.budget.pages, states, recorder, groups
        )
        logger.info("memory: %s", self.budget.describe(self.pool.num_pages))
        if self.states and config.prefix_cache and not slots.kept:
            logger.info("no prefix is reused: its KV is of no use without the recurrent state at its end (see state_snapshots)")
        interval = config.snapshot_interval if takes_chunks else 0  # otherwise everything after one runs token by token
        self.kv = make_kv_manager(config, groups, self.pool.num_pages, slots, self.states, interval)

    def _make_loop(self, limits: ModelLimits, defaults: SamplingParams, threads_to_start: int) -> None:
        """What `step` goes through, from requests to tokens."""
        config = self.config
        self.input_processor = InputProcessor(
            limits, self.kv.longest, config.page_size, self.tokenizer, self.states is not None, defaults,
            None if self.is_causal else config.step_tokens,
        )  # fmt: skip
        width = self.runner.token_ids.chosen if self.pooler is None else self.pooler.body.width
        self.scheduler = Scheduler(
            config, self.kv, score_rows(width) if self.is_causal else NO_SCORES, not self.is_causal, bool(limits.length_borders)
        )
        every_step = torch.get_num_threads() if config.deterministic else None  # another number may round differently
        self.threads = ThreadChoice(config.threads or every_step, threads_to_start) if self.device.type == "cpu" else None
        self.overlaps = bool(config.overlap)
        self.sampler = Sampler(self.runner.ranks)
        self.output_processor = OutputProcessor(self.kv, self.scheduler, self.sampler)
        self.last_scheduled: Sequence[Request] = ()
        self._in_flight: deque[InFlightStep] = deque()  # two at most, the oldest first
        self._nothing_to_do: list[Request] = []  # requests that want no token
        self._is_stepping, self._cancelled_in_step = False, list[str]()
        self._arrivals, self._step_numbers = itertools.count(), itertools.count(1)
        captured = self.steps.graphs is not None and bool(self.steps.graphs.captured)
        self.watch: ModelWatch | None = ModelWatch(self.runner, captured)
        self._steps_since_look, self._look_is_due, self._is_stale = 0, False, False
        self._released = False

    @property
    def limits(self) -> ModelLimits:
        return self.input_processor.limits

    @property
    def default_params(self) -> SamplingParams:
        """Values for params that requests do not set."""
        return self.input_processor.defaults

    @property
    def requests(self) -> Mapping[str, Request]:
        """The requests that have not finished, by id."""
        return self.output_processor.requests

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made, or since their `reset`."""
        return self.output_processor.stats

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
            tenant: within a priority, tenants are admitted in turn, one request each, and so are a tenant's namespaces.
            priority: a lower value is more urgent: admitted first and preempted last.
            text_at_end: decode the text once, when the request ends, which is cheaper than token by token (unless there are stop strings).
            kept_tokens: special tokens that stay in the text.
            lora: the name of a loaded adapter; None: the model without an adapter.

        Raises:
            ValueError: an adapter that is not loaded, an empty prompt, a token id out of range, a prompt beyond the model's positions, an
                id in use, or a schema, regular expression or grammar that cannot be read.
            TypeError: a prompt that is not token ids, an unhashable namespace or tenant, or a priority that is not an integer.
            UnsupportedError: the pool can never hold prompt and new tokens, the message does the sum; or what a guided answer needs is not
                there. Or the model is no longer what the engine runs; see `ModelWatch`.
            ContextError: the engine's memory was freed.
        """
        if self._released:
            raise ContextError("this LLM was closed, and the memory of its KV pages was given back; make another LLM")
        self._look_is_due = self._steps_since_look > 0
        if not self.requests:
            self.look_at_model()
        params = SamplingParams() if params is None else params
        self._refuse_other_task(params, prompt_token_ids)
        arrival = next(self._arrivals)
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
        self.output_processor.expect(request)
        if request.max_new_tokens or request.wants_scores or request.pooled is not None:
            self.scheduler.waiting.append(request)
        else:
            self._nothing_to_do.append(request)
        return request

    def _refuse_other_task(self, params: SamplingParams | PoolingParams, ids: Sequence[int]) -> None:
        if self.pooler is None and isinstance(params, PoolingParams):
            raise UnsupportedError(
                f"this engine of {type(self.runner.model).__name__} generates and has no embeddings; LLM(model, task='embed') embeds"
            )
        if self.pooler is not None and not isinstance(params, PoolingParams):
            does = "embeds texts (llm.embed)" if self.pooler.head is None else "classifies texts (llm.classify)"
            raise UnsupportedError(f"this engine of {self.pooler.body.name} {does} and continues none; see the task of LLM")
        if self.pooler is not None and isinstance(params, PoolingParams):
            self.pooler.check(ids, params.pooling)

    @uninterrupted
    def cancel(self, request_id: str) -> bool:
        """End a request and free all that it holds, now, or when the step is over that this is called from within; False if it is unknown
        or has finished."""
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
        """As `LLM.load_lora`; steps that run meanwhile are not held up. Raises as `LoraPool.load` does, or ValueError: there is no room for
        adapters at all."""
        self._adapters().load(name, source)

    @uninterrupted
    def unload_lora(self, name: str) -> None:
        """As `LLM.unload_lora`; its slot is free for another."""
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
        """Launch one batch and wait for the previous one, or, without overlap, for this one.

        Returns an event per token that came, and one without a token for requests that end without one; with overlap it may return
        none while there is work. After an exception from the model no token is lost: the requests go on with the next call, which
        also brings the events that were due; what has a recurrent state is computed anew. So it is after Ctrl-C, which is raised from
        within the model, or when the step is over.

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
            self._forget_what_was_computed()
        while self._nothing_to_do:
            request = self._nothing_to_do.pop(0)
            if request.finish_reason is None:
                self.output_processor.end(request, FinishReason.LENGTH)
        may_overlap = self.overlaps and not self.scheduler.wants_drain and not self.output_processor.num_host_bound
        self._collect(1 if may_overlap else 0)
        launched = self._launch()
        self._collect(1 if launched and self.overlaps else 0)
        held_back.check()
        return self.due_events()

    @in_plain_modes
    @on_its_device
    def run_rows(self, columns: RequestColumns) -> Tensor:
        """A step of rows that are no requests: logits [sum(num_logits), vocabulary], a copy. Their pages are the caller's, who takes none
        of `kv`: an engine serves either requests or such rows. The model has no recurrent state."""
        step = self.steps.prepare(columns)
        with self.threads.for_step(len(columns.tokens)) if self.threads is not None else nullcontext():
            return self.steps.run(step).logits.clone()

    @uninterrupted
    def clear_prefix_cache(self) -> int:
        """Forget all cached prefixes that no running request uses; returns how many pages that freed."""
        return self.kv.forget_prefixes()

    @uninterrupted
    @on_its_device
    def close(self) -> None:
        """Cancel everything, give the prefix cache's pages back and free all graphs; later steps would run uncaptured."""
        for request_id in list(self.requests):
            self.cancel(request_id)
        self._in_flight.clear()
        self.clear_prefix_cache()
        self.input_processor.guides.close()
        for steps in (self.steps, self.lora_steps):
            if steps is not None:
                steps.close()
        self.watch = None
        self.runner.close()

    @uninterrupted
    @on_its_device
    def release(self) -> None:
        """`close`, and give the memory of KV pages and states back; no step may follow."""
        self.close()
        self._released = True
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)  # steps that were cancelled may still write there
        for pool in (self.pool, self.states):
            if pool is not None:
                pool.release()
        if on_gpu:
            torch.cuda.empty_cache()  # the next engine's pool goes by the memory that the driver calls free, before it captures anything

    @on_its_device
    def look_at_model(self) -> None:
        """Whether it changed: numbers written in place are followed from the next step on.

        Raises:
            ModelChangedError: it is no longer what the engine runs.
        """
        if self.watch is not None:
            if self.pooler is not None and not self.pooler.has_its_body:
                raise model_changed(["its base_model was replaced"], "and the engine goes on with what was there before")
            self._is_stale |= self.watch.look()
            self._steps_since_look, self._look_is_due = 0, False

    def _forget_what_was_computed(self) -> None:
        """Weights changed: running requests keep their tokens and compute KV and states anew, and nobody finds old ones in the cache."""
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
        steps = self.steps
        if self.lora_steps is not None and columns.lora_slots is not None and columns.lora_slots.max() >= 0:
            steps = self.lora_steps
        step = steps.prepare(columns)
        before_model = time.perf_counter()
        own_writes = self.watch.own_writes() if self.watch is not None and step.captured is None else nullcontext()
        try:
            with own_writes, self.threads.for_step(len(columns.tokens)) if self.threads is not None else nullcontext():
                with held_back.let_through():
                    output = steps.run(step)
                self.stats.model_seconds += time.perf_counter() - before_model
                scores = PromptScores(output.logits, [tokens for _, tokens in layout.scored]) if layout.scored else None
                pooled = PooledRows(output.logits, [part for _, part in layout.pooled]) if layout.pooled else None
                chosen = self._choose(output, layout) if layout.sampling else None
            launched = InFlightStep(layout, chosen, next(self._step_numbers), scores, pooled).begin()
        except BaseException:
            with self.kv.states.leaving_none(requests):
                try:
                    self._collect(0)  # earlier results are not lost
                finally:
                    self._restart([request for request in requests if request.finish_reason is None])
            self.last_scheduled = requests
            raise
        self._in_flight.append(launched)
        self.kv.states.keep(requests)
        self.stats.steps += 1
        self.stats.prompt_tokens += layout.num_of_prompts
        return True

    def _choose(self, output: StepOutput, layout: StepLayout) -> SamplerOutput:
        if layout.sample_rows is not None:
            rows = copy_to_device(layout.sample_rows, output.logits.device)
            output = StepOutput(output.logits.index_select(0, rows), None)
        chosen = self.sampler.choose(output.logits, layout.states, output.greedy_tokens)
        if chosen.tokens is not output.greedy_tokens:
            self.steps.future_tokens.store(chosen.tokens)
        return chosen

    def _collect(self, keep: int) -> None:
        """Take in what the oldest steps chose, until `keep` are left, and what an exception left over; events go to the processor."""
        while self._in_flight and (len(self._in_flight) > keep or self._in_flight[0].has_come or not self.requests):
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
                self._restart(list(lost))  # when none has a token under way any more
                raise
            finally:
                self.stats.model_seconds += time.perf_counter() - started
            self.output_processor.process(in_flight)
            self._in_flight.popleft()

    def _restart(self, requests: list[Request]) -> None:
        """After an error: what the device counted for them is not to be relied on, and recurrent states are computed anew: unlike KV, which
        the next try writes over, a state that has advanced cannot be taken back."""
        with self.kv.states.leaving_none(requests):
            for request in requests:
                self.sampler.forget(request.sampling)
                if not self.kv.can_go_on(request):
                    self.scheduler.preempt(request)

    def due_events(self) -> TokenEvents:
        """Events that the next `step` would return first: of tokens that came before a step failed."""
        return self.output_processor.take_pending()
