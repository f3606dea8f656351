"""Plain `model.generate` of transformers: one batch of prompts of equal length, SDPA, a cache made for each call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paged_attn.bench.systems import model_source
from paged_attn.bench.systems.job import Job, Sampling
from paged_attn.bench.systems.systems import Run, Stamps, System, Tokens, rows_of, versions_of
from paged_attn.bench.workloads import Prompts


def start(job: Job) -> HFGenerate:
    """Options are keywords of `generate`, e.g. {"cache_implementation": "static"}."""
    return HFGenerate(model_source.load(job.model), dict(job.options), job.sampling)


class HFGenerate(System):
    def __init__(self, model: Any, options: dict[str, Any], sampling: Sampling) -> None:
        self.model, self.options, self.sampling = model, options, sampling
        model.generation_config.eos_token_id = None  # generate() takes from here what its own arguments leave open

    @contextmanager
    def ready(self, prompts: Prompts, new: int, *, stamped: bool) -> Iterator[Run]:
        yield lambda: self._run(prompts, new, _Clock(len(prompts)) if stamped else None)

    def _run(self, prompts: Prompts, new: int, clock: _Clock | None) -> tuple[Tokens, Stamps | None]:
        import torch

        rows = torch.tensor(prompts, device=self.model.device)
        with torch.no_grad():
            output = self.model.generate(
                input_ids=rows, attention_mask=torch.ones_like(rows), num_beams=1, max_new_tokens=new, pad_token_id=0,
                streamer=clock, **self.sampling.for_transformers, **self.options,
            )  # fmt: skip
        tokens = rows_of(output[:, rows.shape[1] :].tolist())
        return tokens, None if clock is None else clock.stamps

    def facts(self) -> dict[str, Any]:
        return {
            "versions": versions_of("torch", "transformers"),
            "attention": self.model.config._attn_implementation,
            "options": self.options,
        }


class _Clock:
    """A streamer: `generate` gives it the prompts, and then each step's tokens once they are on the host."""

    def __init__(self, rows: int) -> None:
        self.stamps: Stamps = [[] for _ in range(rows)]
        self._prompts = True

    def put(self, tokens: Any) -> None:
        now = time.perf_counter()
        for row in () if self._prompts else self.stamps:
            row.append(now)
        self._prompts = False

    def end(self) -> None: ...
