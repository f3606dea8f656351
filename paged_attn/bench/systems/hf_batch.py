"""Continuous batching of transformers: what `model.generate_batch` runs, with its set-up outside the timed part."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from paged_attn.bench.systems import model_source
from paged_attn.bench.systems.job import Job, Sampling
from paged_attn.bench.systems.systems import Run, Stamps, System, Tokens, rows_of, versions_of
from paged_attn.bench.workloads import Prompts

CPU_PAGE = 32
WAIT_SECONDS = 1.0
NO_TOKEN = -1  # as the end token: no request ends early


def start(job: Job) -> HFBatch:
    """Options are fields of transformers' ContinuousBatchingConfig. Raises ValueError: an option is unknown."""
    from transformers import ContinuousBatchingConfig

    known = {setting.name for setting in fields(ContinuousBatchingConfig)}
    if unknown := sorted(set(job.options) - known):
        raise ValueError(f"transformers' ContinuousBatchingConfig has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    options = dict(job.options)
    if "auto_switch_to_flash" in known:
        options.setdefault("auto_switch_to_flash", False)  # SDPA is what the column says
    if job.model.device == "cpu":  # its own choice is a share of all memory, and takes half a minute to fill
        page = "page_size" if "page_size" in known else "block_size"
        size = options.setdefault(page, CPU_PAGE)
        tokens = max(sum(len(prompt) + task.workload.new for prompt in task.prompts) for task in job.tasks)
        requests = max(task.workload.requests for task in job.tasks)
        options.setdefault("num_blocks", -(-tokens // size) + 2 * requests)
        options.setdefault("max_batch_tokens", min(2048, max(256, tokens)))
    return HFBatch(model_source.load(job.model), ContinuousBatchingConfig, options, job.sampling)


class HFBatch(System):
    stamps_are_free = True

    def __init__(self, model: Any, config: Any, options: dict[str, Any], sampling: Sampling) -> None:
        self.model, self._config, self.options, self.sampling = model, config, options, sampling
        self.attention = model.config._attn_implementation

    @contextmanager
    def ready(self, prompts: Prompts, new: int, *, stamped: bool) -> Iterator[Run]:
        """A manager for each run, since its prefix cache can be emptied in no other way; it is warmed up before the run is timed."""
        import torch
        from transformers import GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        gc.collect()  # the manager before this one held most of the free memory, in cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        generation = GenerationConfig(**self.sampling.for_transformers, max_new_tokens=new, eos_token_id=NO_TOKEN, pad_token_id=0)
        hints = WorkloadHints(max_prompt_length=max(map(len, prompts)), max_generated_length=new, num_requests=len(prompts))
        with self.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=self._config(**self.options), workload_hints=hints, timeout=5
        ) as manager:
            self.attention = self.model.config._attn_implementation  # the manager may have changed it
            yield lambda: _run(manager, prompts, new, stamped)

    def facts(self) -> dict[str, Any]:
        return {
            "versions": versions_of("torch", "transformers"),
            "attention": self.attention,
            "options": {name: value for name, value in self.options.items() if isinstance(value, (int, float, str, bool))},
        }


def _run(manager: Any, prompts: Prompts, new: int, stamped: bool) -> tuple[Tokens, Stamps | None]:
    order = manager.add_requests(inputs=prompts, max_new_tokens=new, record_timestamps=stamped)
    done: dict[str, Any] = {}
    while len(done) < len(prompts):
        result = manager.get_result(timeout=WAIT_SECONDS)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"transformers' continuous batching ended {result.request_id} with: {result.error}")
            done[result.request_id] = result
        elif result is None and not manager.is_running():
            raise RuntimeError(f"transformers' continuous batching stopped with {len(done)} of {len(prompts)} requests done; see its log")
    tokens = rows_of([done[name].generated_tokens for name in order])
    return tokens, [list(done[name].timestamps) for name in order] if stamped else None
