"""This engine, through `paged_attn.LLM`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paged_attn.bench.systems import model_source
from paged_attn.bench.systems.job import Job, Sampling
from paged_attn.bench.systems.systems import Run, Stamps, System, Tokens, versions_of
from paged_attn.bench.workloads import Prompts
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.llm import LLM
from paged_attn.engine.runners.compilers import start_compilers
from paged_attn.engine.sampling_params import SamplingParams


def start(job: Job) -> Ours:
    """Options are fields of EngineConfig. Raises UnsupportedError as `LLM` does."""
    started = time.perf_counter()
    config = EngineConfig.from_environment(**{"generation_config": "ours", **job.options})
    start_compilers(job.model.device, config)  # as where `LLM` reads the weights itself
    model = model_source.load(job.model)
    loaded = time.perf_counter()
    llm = LLM(model, config=config, progress=job.progress or None)
    return Ours(llm, loaded - started, job.sampling)


class Ours(System):
    def __init__(self, llm: LLM, load_seconds: float, sampling: Sampling) -> None:
        self.llm, self.load_seconds, self.sampling = llm, load_seconds, sampling

    @contextmanager
    def ready(self, prompts: Prompts, new: int, *, stamped: bool) -> Iterator[Run]:
        self.llm.clear_prefix_cache()
        tree = self.llm.engine.kv.tree
        if tree is not None and tree.num_pages:
            raise RuntimeError(f"{tree.num_pages} pages stayed in the prefix cache after it was cleared")
        params = SamplingParams(max_new_tokens=new, ignore_eos=True, **self.sampling.given)
        yield lambda: self._stamped(prompts, params) if stamped else (self._generate(prompts, params), None)

    def _generate(self, prompts: Prompts, params: SamplingParams) -> Tokens:
        return [completion.token_ids for completion in self.llm.generate(prompts, params, progress=False)]

    def _stamped(self, prompts: Prompts, params: SamplingParams) -> tuple[Tokens, Stamps]:
        tokens: Tokens = [[] for _ in prompts]
        stamps: Stamps = [[] for _ in prompts]
        for event in self.llm.stream(prompts, params):
            if event.token_id is not None:
                tokens[event.index].append(event.token_id)
                stamps[event.index].append(time.perf_counter())
        return tokens, stamps

    def facts(self) -> dict[str, Any]:
        engine = self.llm.engine
        return {
            "versions": versions_of("paged_attn", "torch", "transformers"),
            "attention": engine.selection.describe(),
            "graphs": [line.strip() for line in engine.step_runner.report().lines()],
            "kv_pool_gib": engine.pool.nbytes / 2**30,
            "start_parts": {"load": self.load_seconds, **engine.start_seconds},
        }

    def close(self) -> None:
        self.llm.close()
