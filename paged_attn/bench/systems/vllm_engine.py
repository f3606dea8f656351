"""vLLM (written against 0.20's public classes): its own model class, or its Transformers backend, by the system's name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paged_attn.bench.systems.job import Job, Sampling
from paged_attn.bench.systems.systems import Run, Stamps, System, Tokens, rows_of, versions_of
from paged_attn.bench.workloads import Prompts

IMPLEMENTATIONS = {"vllm": "auto", "vllm-transformers": "transformers"}


def start(job: Job) -> VLLM:
    """Options are keywords of `vllm.LLM`, over those that the job asks for."""
    from vllm import LLM

    asked = {
        "model": job.model.path, "dtype": job.model.dtype, "model_impl": IMPLEMENTATIONS[job.system],
        "load_format": "dummy" if job.model.random_weights else "auto", "skip_tokenizer_init": True,
        "max_model_len": job.longest, "enable_prefix_caching": True, "seed": 0,
    }  # fmt: skip
    return VLLM(LLM(**{**asked, **job.options}), {**asked, **job.options}, job.sampling)


class VLLM(System):
    """Its engine's process ends with this one; vLLM has no public way to end it before."""

    def __init__(self, llm: Any, options: dict[str, Any], sampling: Sampling) -> None:
        self.llm, self.options, self.sampling = llm, options, sampling
        self._calls = 0

    @contextmanager
    def ready(self, prompts: Prompts, new: int, *, stamped: bool) -> Iterator[Run]:
        from vllm import TokensPrompt

        if self.options["enable_prefix_caching"] and self.llm.reset_prefix_cache() is False:  # older ones return None
            raise RuntimeError("vLLM did not empty its prefix cache")
        wrapped = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        yield lambda: self._stamped(wrapped, new) if stamped else (self._generate(wrapped, new), None)

    def _generate(self, prompts: list[Any], new: int) -> Tokens:
        outputs = self.llm.generate(prompts, self._params(new), use_tqdm=False)
        return rows_of([output.outputs[0].token_ids for output in outputs])

    def _stamped(self, prompts: list[Any], new: int) -> tuple[Tokens, Stamps]:
        """The loop of `LLM.generate` over the engine's steps, with new tokens only in each output."""
        from vllm.sampling_params import RequestOutputKind

        engine, tokens, stamps = self.llm.llm_engine, [[] for _ in prompts], [[] for _ in prompts]  # type: Any, Tokens, Stamps
        self._calls += 1
        names = {f"bench-{self._calls}-{row}": row for row in range(len(prompts))}
        for name, row in names.items():
            engine.add_request(name, prompts[row], self._params(new, output_kind=RequestOutputKind.DELTA))
        while engine.has_unfinished_requests():
            for output in engine.step():
                now, row = time.perf_counter(), names[output.request_id]
                fresh = list(output.outputs[0].token_ids)
                tokens[row] += fresh
                stamps[row] += [now] * len(fresh)
        return tokens, stamps

    def _params(self, new: int, **more: Any) -> Any:
        from vllm import SamplingParams

        how = {"temperature": 0.0, **self.sampling.given}  # its own default is 1
        return SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, **how, **more)

    def facts(self) -> dict[str, Any]:
        return {"versions": versions_of("vllm", "torch", "transformers"), "options": self.options}
