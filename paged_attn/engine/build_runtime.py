"""Builds what an engine's steps run on: the runner, the graphs, and a KV pool in the memory that they leave."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from paged_attn.attn_ops.batch.step_buffers import MIN_ROWS
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.kv.layer_groups import LayerGroup, group_layers
from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.backends.attention.by_group import by_group
from paged_attn.backends.devices import has_triton, memory_of
from paged_attn.backends.selection.select import Selection, select_for_pool
from paged_attn.capture.graphs.recorder import CudaRecorder, Recorder
from paged_attn.engine.config import MANY_EXPERTS, MANY_EXPERTS_STEP_TOKENS, EngineConfig
from paged_attn.engine.generation_config import default_params
from paged_attn.engine.lora.lora_pool import LoraPool
from paged_attn.engine.lora.lora_runner import LoraRunner, LoraSlots, check_adapters
from paged_attn.engine.memory.budget import MemoryBudget
from paged_attn.engine.memory.grouped_kv import make_kv_manager, num_page_ids
from paged_attn.engine.memory.kv_manager import KVManager
from paged_attn.engine.model.model_limits import ModelLimits
from paged_attn.engine.pooling.pooler import Pooler
from paged_attn.engine.runners.make_runner import make_runner
from paged_attn.engine.runners.runner import Runner
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.engine.sampling.sampler import greedy_sample
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.engine.steps.capture_specs import CaptureSettings
from paged_attn.engine.steps.step_runner import StepRunner
from paged_attn.engine.steps.thread_choice import ThreadChoice, num_threads, num_threads_to_start
from paged_attn.passes.fx.model_facts import model_device
from paged_attn.recurrent.run import RecurrentRunner
from paged_attn.stopwatch import part

MOST_CAPTURED_ROWS = 2048  # for more rows the device takes longer than the host needs to launch the ops one by one
SCRATCH_PAGES = 2  # page 0, and one page that all tokens of a recording share
logger = logging.getLogger("paged_attn")


@dataclass(frozen=True)
class Runtime:
    """What an engine's steps run on, built once.

    Attributes:
        config: the settings as device and model allow them.
        is_causal: no token sees later ones.
        defaults: values of params that a request does not set.
        state_pool: of recurrent layers; None without them.
        lora_step_runner: runs steps in which a request has an adapter; None without adapters, as `adapters` is.
        threads: of steps on a CPU; None elsewhere.
    """

    config: EngineConfig
    runner: Runner
    is_causal: bool
    limits: ModelLimits
    defaults: SamplingParams
    budget: MemoryBudget
    state_pool: StatePool | None
    adapters: LoraPool | None
    step_runner: StepRunner
    lora_step_runner: StepRunner | None
    pool: KVPool
    selection: Selection
    kv: KVManager
    threads: ThreadChoice | None


def build_runtime(model: nn.Module, given: EngineConfig, pooler: Pooler | None, recorder: Recorder | None) -> Runtime:
    """Trace or hook the model, divide the memory, allocate the pools, and capture the steps that use them.

    Args:
        model: what the steps run: a causal LM, or the body of `pooler`.
        recorder: see `allocate_and_capture`.

    Raises:
        UnsupportedError: see `Engine`.
        ValueError: a setting does not fit the model, the device or its memory.
    """
    device = model_device(model)
    cuda = device.type == "cuda"
    config = given.resolved(cuda=cuda, has_triton=cuda and has_triton())
    to_start = num_threads_to_start(model)
    with num_threads(config.threads or to_start):
        runner = make_runner(model, config)
    if pooler is not None:
        _refuse_for_pooling(runner, pooler, config)
    is_causal = all(spec.causal for spec in runner.layers if spec.by_backend)
    config = _adapt_to_model(config, runner, is_causal, given.max_batch_tokens)
    limits = ModelLimits.of(model, runner.max_positions, runner.length_borders, runner.token_ids).within(config.max_model_len)
    defaults = default_params(model, limits.eos_token_ids) if config.generation_config == "auto" else SamplingParams()

    recurrent = [layer.spec for layer in runner.recurrent]
    takes_chunks = all(layer.takes_chunks for layer in runner.recurrent)
    groups = group_layers(runner.layers, limits.max_positions, config.page_size) if config.layer_groups and pooler is None else ()
    agree = int if runner.ranks is None else runner.ranks.least
    budget = MemoryBudget(config, runner.layers, runner.dtype, device, groups, recurrent, limits.max_positions, takes_chunks, agree)
    state_pool = StatePool(recurrent, budget.slots.total, device) if recurrent else None
    states = RecurrentRunner(runner.recurrent, state_pool) if state_pool else None
    with_adapters = None
    if config.max_loras:
        assert isinstance(runner, TracedRunner) and runner.compiled.lora is not None
        with_adapters = LoraRunner(runner, runner.compiled.lora, config.max_loras, config.max_lora_rank)
    step_runner, lora_step_runner, pool, selection = allocate_and_capture(
        runner, with_adapters, config, budget.pages, states, recorder, groups
    )
    logger.info("memory: %s", budget.describe(pool.num_pages))
    if state_pool and config.prefix_cache and not budget.slots.kept:
        logger.info("no prefix is reused: its KV is useless without the recurrent state at its end (see state_snapshots)")
    interval = config.snapshot_interval if takes_chunks else 0  # otherwise everything after one runs token by token
    kv = make_kv_manager(config, groups, pool.num_pages, budget.slots, state_pool, interval)
    if pooler is None:
        _warm_sampler(runner)
    every_step = torch.get_num_threads() if config.deterministic else None  # another number may round differently
    threads = ThreadChoice(config.threads or every_step, to_start) if device.type == "cpu" else None
    return Runtime(
        config=config, runner=runner, is_causal=is_causal, limits=limits, defaults=defaults, budget=budget, kv=kv, pool=pool,
        state_pool=state_pool, selection=selection, step_runner=step_runner, lora_step_runner=lora_step_runner,
        adapters=None if with_adapters is None else with_adapters.adapters, threads=threads,
    )  # fmt: skip


def _refuse_for_pooling(runner: Runner, pooler: Pooler, config: EngineConfig) -> None:
    """Raises UnsupportedError for settings with which models that embed are not supported."""
    if runner.ranks is not None:
        why = f"{pooler.body.name} is sharded over {runner.ranks.size} ranks; models that embed or classify run whole on each device"
    elif config.max_loras:
        why = (
            f"max_loras={config.max_loras}: {pooler.body.name} embeds or classifies, and adapters by request are for models "
            "that generate; leave max_loras and loras out, or merge one into the weights (model.merge_and_unload())"
        )
    else:
        return
    runner.close()
    raise UnsupportedError(why)


def _warm_sampler(runner: Runner) -> None:
    """Have the kernels compiled that choose tokens, in other processes; nothing waits for them."""
    if runner.device.type == "cuda" and has_triton():
        from paged_attn.backends.sampling.ahead import ask_for_kernels

        ask_for_kernels(runner.token_ids.chosen, runner.dtype, runner.device)


@part("graphs and pool")
def allocate_and_capture(
    runner: Runner,
    with_adapters: LoraRunner | None,
    config: EngineConfig,
    num_pages: Callable[[int], int],
    recurrent: RecurrentRunner | None,
    recorder: Recorder | None,
    groups: Sequence[LayerGroup],
) -> tuple[StepRunner, StepRunner | None, KVPool, Selection]:
    """Capture the pieces, measure what full graphs will take, allocate the pool in what is left, and capture the full graphs on it.

    Args:
        with_adapters: runs steps in which a request has an adapter; it gets its own graphs under its own budget.
        num_pages: how many pages the pool has if so many bytes are kept free.
        recorder: None records CUDA graphs on a GPU and nothing elsewhere.
        groups: layers with their own page tables.
    """
    if recorder is None and runner.device.type == "cuda":
        recorder = CudaRecorder(runner.device)
    if config.graphs == "off":
        recorder = None
    if runner.ranks is not None:
        num_pages = runner.ranks.least_of(num_pages)  # every rank's pool has room for the same tokens
    max_pages = _max_pages(runner, config, num_pages, groups)
    longest = runner.max_positions or max_pages * config.page_size
    settings = capture_settings(config, runner.one_row, longest)
    step_runner = partial(
        StepRunner, recorder=recorder, page_size=config.page_size, max_pages=max_pages, recurrent=recurrent,
        greedy_in_graph=greedy_sample if config.graph_sampling else None, num_groups=max(len(groups), 1),
    )  # fmt: skip
    without_adapters = step_runner(runner, settings)
    lora_step_runner = None
    if with_adapters is not None:
        settings = capture_settings(config, with_adapters.one_row, longest)
        slots = LoraSlots(max(settings.max_rows, settings.max_requests), settings.max_requests, runner.device)
        lora_step_runner = step_runner(
            with_adapters, settings, future_tokens=without_adapters.future_tokens, one_row=without_adapters.one_row, lora_slots=slots
        )
    step_runners = [each for each in (without_adapters, lora_step_runner) if each is not None]
    kept_free = 0
    for each in step_runners:
        if each.graphs is not None:
            scratch = _make_pool(runner, config, SCRATCH_PAGES, groups)
            each.use(scratch, _select(runner, config, scratch).backend)
            each.capture_pieces()
            kept_free += each.measure_full_graph_bytes()
    pool = _make_pool(runner, config, num_pages(kept_free), groups)
    selection = _select(runner, config, pool)
    if with_adapters is not None and config.self_check:
        check_adapters(with_adapters, pool, selection.backend)
    for each in step_runners:
        each.use(pool, selection.backend)
        if each.graphs is not None:
            each.capture_full()
            for line in each.report().lines():
                logger.info("%s", line.strip())
    return without_adapters, lora_step_runner, pool, selection


def _make_pool(runner: Runner, config: EngineConfig, pages: int, groups: Sequence[LayerGroup]) -> KVPool:
    if config.kv_memory_gib is not None and config.kv_memory_gib > (most := memory_of(runner.device) / 2**30):
        raise ValueError(f"kv_memory_gib is {config.kv_memory_gib:g}, and {runner.device} has {most:.1f} GiB in all; lower it")
    try:
        return KVPool(runner.layers, pages, config.page_size, runner.dtype, runner.device, groups)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # PyTorch's error when a CPU has too little memory
        what = f"{pages} pages of {config.page_size} tokens of KV cannot be allocated on {runner.device}"
        raise ValueError(f"{what}; lower kv_memory_gib or num_pages. PyTorch says: {error}") from error


def _select(runner: Runner, config: EngineConfig, pool: KVPool) -> Selection:
    """The attention backend, wrapped to plan each group of layers separately where the pool has groups."""
    selection = select_for_pool(config.backend, pool, runner.dtype, deterministic=config.deterministic)
    return replace(selection, backend=by_group(selection.backend, pool))


def _adapt_to_model(config: EngineConfig, runner: Runner, is_causal: bool, given_step_tokens: int | None) -> EngineConfig:
    """The settings as the model allows: it may limit the tokens of a step, and without causal attention there is no prefix cache.
    `given_step_tokens`: the caller's own `max_batch_tokens`; the model may lower it, but nothing raises it."""
    if runner.device.type == "cuda" and given_step_tokens is None:
        config = config.with_(max_batch_tokens=_step_tokens_on_gpu(config, runner))
    if runner.max_rows is not None and runner.max_rows < config.step_tokens:
        config = config.with_(max_batch_tokens=runner.max_rows)
    return config if is_causal else config.with_(prefix_cache=False)


def _step_tokens_on_gpu(config: EngineConfig, runner: Runner) -> int:
    """The default of `max_batch_tokens` for this model."""
    tokens = MANY_EXPERTS_STEP_TOKENS if runner.experts_per_choice >= MANY_EXPERTS else config.step_tokens
    if not (config.deterministic and has_triton()):
        return tokens
    from paged_attn.backends.attention.triton.deterministic import step_tokens
    from paged_attn.backends.machine import machine_of

    device = runner.device
    return step_tokens(runner.layers, runner.dtype, runner.max_positions, tokens, machine_of(device), memory_of(device))


def capture_settings(config: EngineConfig, one_row: bool, longest: int = MOST_CAPTURED_ROWS) -> CaptureSettings:
    """`longest`: the most tokens of a request, so that no captured size exceeds what all requests together can need."""
    max_requests = min(config.max_requests, max(config.step_tokens, MIN_ROWS))
    return CaptureSettings(
        full=config.graphs == "full",
        max_requests=max_requests,
        max_rows=min(max(config.step_tokens, MIN_ROWS), MOST_CAPTURED_ROWS, max(max_requests * longest, MIN_ROWS)),
        decode_sizes=config.graph_decode_sizes,
        extend_sizes=config.graph_extend_sizes,
        budget_bytes=int(config.graph_memory_gib * 2**30),
        strict=config.graph_strict,
        verify=config.graph_verify,
        one_row=one_row,
    )


def _max_pages(runner: Runner, config: EngineConfig, num_pages: Callable[[int], int], groups: Sequence[LayerGroup]) -> int:
    """The most pages of one request: as many as the model's positions need, or the whole pool."""
    if runner.max_positions is not None:
        return -(-runner.max_positions // config.page_size)
    return max((num_page_ids(groups, num_pages(0)) if groups else num_pages(0)) - 1, 1)
