"""The classes of vLLM 0.20 that the bench uses, without a model: a token is made from the prompt's sum and its number."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

from vllm.sampling_params import RequestOutputKind, SamplingParams

__all__ = ["LLM", "SamplingParams", "TokensPrompt"]
__version__ = "0.20.2"


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


@dataclass
class CompletionOutput:
    token_ids: list[int]


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]
    finished: bool


def answer(prompt: list[int], new: int) -> list[int]:
    return [(sum(prompt) + i) % 50 for i in range(new)]


class LLMEngine:
    """One token per request and step, in the order of the last request first; outputs hold new tokens only, if asked for."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[list[int], SamplingParams, list[int]]] = {}

    def add_request(self, request_id: str, prompt: TokensPrompt, params: SamplingParams) -> None:
        assert request_id not in self.running
        LLM.params.append(params)
        self.running[request_id] = (answer(prompt["prompt_token_ids"], params.max_tokens), params, [])

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[RequestOutput]:
        time.sleep(0.0002)
        outputs = []
        for name, (wanted, params, done) in reversed(self.running.items()):
            done.append(wanted[len(done)])
            shown = done[-1:] if params.output_kind is RequestOutputKind.DELTA else list(done)
            outputs.append(RequestOutput(name, [CompletionOutput(shown)], len(done) == len(wanted)))
        for output in outputs:
            if output.finished:
                del self.running[output.request_id]
        return outputs


class LLM:
    made: ClassVar[dict[str, Any]] = {}
    params: ClassVar[list[SamplingParams]] = []
    resets: ClassVar[int] = 0

    def __init__(self, *, fail_beyond: int | None = None, **options: Any) -> None:
        LLM.made, LLM.params, LLM.resets = options, [], 0
        self.fail_beyond = fail_beyond
        self.llm_engine = LLMEngine()

    def reset_prefix_cache(self) -> bool:
        LLM.resets += 1
        return not self.llm_engine.has_unfinished_requests()

    def generate(self, prompts: list[TokensPrompt], sampling_params: SamplingParams, *, use_tqdm: bool = True) -> list[RequestOutput]:
        assert not use_tqdm
        if self.fail_beyond is not None and any(len(prompt["prompt_token_ids"]) > self.fail_beyond for prompt in prompts):
            raise RuntimeError("fake out of memory")
        for i, prompt in enumerate(prompts):
            self.llm_engine.add_request(str(i), prompt, sampling_params)
        done: dict[str, RequestOutput] = {}
        while self.llm_engine.has_unfinished_requests():
            done |= {output.request_id: output for output in self.llm_engine.step()}
        return [done[str(i)] for i in range(len(prompts))]
