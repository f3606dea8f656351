"""From a model and settings to what runs its steps: the runner, the graphs, and a KV pool in the memory that they leave."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.experts import use_experts
from paged_attn.attn_ops.ops.linear import use_one_row_kernel
from paged_attn.attn_ops.ops.routing import use_route
from paged_attn.backends.kv_write.store import has_triton
from paged_attn.backends.selection.select import Selection, select_for_pool
from paged_attn.capture.graphs.recorder import CudaRecorder, Recorder
from paged_attn.check.runs.steps import ProbeSettings
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.runners.model_runner import ModelRunner
from paged_attn.engine.runners.patched_runner import PatchedRunner
from paged_attn.engine.runners.runner import Runner
from paged_attn.engine.sampling.sampler import greedy_sample
from paged_attn.engine.steps.capture_progress import show_progress
from paged_attn.engine.steps.capture_settings import CaptureSettings
from paged_attn.engine.steps.step_runner import StepRunner
from paged_attn.engine.tracing.trace_model import only_device
from paged_attn.parallel.local_model import served_locally
from paged_attn.passes.report import OptionalPasses
from paged_attn.recurrent.run import RecurrentRunner

MOST_CAPTURED_ROWS = 2048  # a step of more takes the device longer than the host takes to launch it op by op
SCRATCH_PAGES = 2  # page 0, and one that all tokens of a recording share
logger = logging.getLogger("paged_attn")


def make_runner(model: nn.Module, config: EngineConfig) -> Runner:
    """Trace and rewrite the model, or hook its attention, as `config.compile` says; the config is resolved."""
    options = CompileOptions(inductor=config.inductor, self_check=config.self_check)
    with served_locally(model) as ranks:
        if ranks is not None:
            ranks.check_same("the engine's settings", repr(config).encode())
        probe = ProbeSettings(config.backend, config.page_size, config.deterministic)
        if not config.compile:
            return PatchedRunner(model, options, config.follow_generate, probe)
        if only_device(model).type == "cuda" and has_triton():
            from paged_attn.backends.experts.on_gpu import experts_on_gpu
            from paged_attn.backends.experts.triton.route import route
            from paged_attn.backends.linear.gemv import one_row_linear
            from paged_attn.backends.scans.on_gpu import use_scans_on_gpu

            use_one_row_kernel(one_row_linear)
            use_experts(experts_on_gpu)
            use_route(route)
            use_scans_on_gpu()
        passes = OptionalPasses(
            experts=True,
            routing=True,
            scans=True,
            merge_linears=bool(config.merge_linears),
            early_logits_gather=config.early_logits_gather,
            gemv=bool(config.gemv),
        ).without(config.disable_passes)
        runner = ModelRunner(model, replace(options, pdl=bool(config.pdl), passes=passes), config.follow_generate, probe)
    if ranks is not None and runner.recurrent:
        runner.close()
        raise UnsupportedError(
            f"{type(model).__name__} is sharded over {ranks.size} ranks and has recurrent state in {runner.recurrent[0].spec.module}; "
            "tensor parallelism is known for attention alone. Run it whole on each device and share out the requests (data parallel)"
        )
    return runner


def ready_to_step(
    runner: Runner,
    config: EngineConfig,
    num_pages: Callable[[int], int],
    recurrent: RecurrentRunner | None,
    recorder: Recorder | None,
) -> tuple[StepRunner, KVPool, Selection]:
    """Capture the pieces, measure what full graphs will take, make the pool from what is left, and capture the full graphs on it.

    Args:
        num_pages: how many pages the pool has if so many bytes are kept free.
        recorder: None makes CUDA graphs on a GPU and nothing elsewhere.
    """
    if recorder is None and runner.device.type == "cuda":
        recorder = CudaRecorder(runner.device)
    if config.graphs == "off":
        recorder = None

    if runner.ranks is not None:
        num_pages = runner.ranks.least_of(num_pages)  # every rank's pool has room for the same tokens

    tail = greedy_sample if config.graph_sampling else None

    def select(pool: KVPool) -> Selection:
        return select_for_pool(
            config.backend, pool, runner.dtype, deterministic=config.deterministic, speculative=config.speculative_backend
        )

    settings, max_pages = capture_settings(config, runner.one_row), _max_pages(runner, config, num_pages)
    steps = StepRunner(runner, settings, recorder, config.page_size, max_pages, recurrent, tail)
    kept_free = 0
    if steps.graphs is not None:
        scratch = KVPool(runner.layers, SCRATCH_PAGES, config.page_size, runner.dtype, runner.device)
        steps.use(scratch, select(scratch).backend)
        steps.capture_pieces(show_progress(steps.graphs, "piecewise"))
        kept_free = steps.full_bytes()
    pool = KVPool(runner.layers, num_pages(kept_free), config.page_size, runner.dtype, runner.device)
    selection = select(pool)
    steps.use(pool, selection.backend)
    if steps.graphs is not None:
        steps.capture_full(show_progress(steps.graphs, "decode steps"))
        for line in steps.report().lines():
            logger.info("%s", line.strip())
    return steps, pool, selection


def capture_settings(config: EngineConfig, one_row: bool) -> CaptureSettings:
    return CaptureSettings(
        full=config.graphs == "full",
        max_requests=min(config.max_requests, max(config.step_tokens, 2)),
        max_rows=min(max(config.step_tokens, 2), MOST_CAPTURED_ROWS),
        decode_sizes=config.graph_decode_sizes,
        extend_sizes=config.graph_extend_sizes,
        budget_bytes=int(config.graph_memory_gib * 2**30),
        strict=config.graph_strict,
        verify=config.graph_verify,
        one_row=one_row,
    )


def _max_pages(runner: Runner, config: EngineConfig, num_pages: Callable[[int], int]) -> int:
    """Of one request: as the model's positions allow, or all of the pool."""
    if runner.max_positions is not None:
        return -(-runner.max_positions // config.page_size)
    return max(num_pages(0) - 1, 1)
