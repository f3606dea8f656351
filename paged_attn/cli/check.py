"""`--check`: the unmodified model's own `generate` on the same prompts, for the same tokens and for its speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paged_attn.cli.token_text import token_text
from paged_attn.engine.llm import LLM
from paged_attn.engine.requests.outputs import Completion
from paged_attn.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class CheckResult:
    """`difference` says where the first token differs, or is None; the seconds are of transformers' one left-padded batch."""

    compared_tokens: int
    difference: str | None
    padded_batch_tokens: int
    padded_batch_seconds: float

    @property
    def passed(self) -> bool:
        return self.difference is None

    @property
    def padded_batch_tokens_per_second(self) -> float:
        return self.padded_batch_tokens / max(self.padded_batch_seconds, 1e-9)


def check(llm: LLM, completions: Sequence[Completion], params: SamplingParams) -> CheckResult:
    """Compare every completion with greedy `generate`, one prompt at a time, and time `generate` on all prompts at once."""
    params = params.over(llm.default_params)
    difference = None
    for number, completion in enumerate(completions):
        expected = own_tokens(llm, [completion.prompt_token_ids], params)[0]
        difference = difference or _difference(llm, number, completion, expected)
    started = time.perf_counter()
    padded = own_tokens(llm, [completion.prompt_token_ids for completion in completions], params)
    seconds = time.perf_counter() - started
    return CheckResult(sum(len(c.token_ids) for c in completions), difference, sum(map(len, padded)), seconds)


def own_tokens(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    """New tokens of transformers' greedy `generate` for a left-padded batch (of one: no padding), each up to its end token."""
    model: Any = llm.engine.runner.model
    limits, longest = llm.engine.limits, max(map(len, prompts))
    count = limits.allowed_new_tokens(longest, params.max_new_tokens)
    if count == 0:
        return [[] for _ in prompts]
    end = frozenset() if params.ignore_eos else limits.eos_token_ids
    pad = next(iter(sorted(limits.eos_token_ids)), 0)
    rows = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=llm.engine.runner.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=rows.device)
    with torch.no_grad():
        output = model.generate(
            input_ids=rows, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=count,
            min_new_tokens=params.min_tokens or None, min_length=0,
            eos_token_id=sorted(end) or None, pad_token_id=pad, repetition_penalty=params.repetition_penalty, no_repeat_ngram_size=0,
            temperature=None, top_k=None, top_p=None,
        )  # fmt: skip
    return [_until(row, end) for row in output[:, longest:].tolist()]


def _until(tokens: list[int], end: frozenset[int]) -> list[int]:
    last = next((i for i, token in enumerate(tokens) if token in end), len(tokens))
    return tokens[: last + 1]


def _difference(llm: LLM, number: int, completion: Completion, expected: list[int]) -> str | None:
    got = completion.token_ids
    if isinstance(completion.stop_reason, str):  # a stop string ended ours; generate() was not given it
        expected = expected[: len(got)]
    if got == expected:
        return None
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    ours, theirs = (_token(llm, tokens, at) for tokens in (got, expected))
    dtype = llm.engine.runner.dtype
    hint = "" if dtype == torch.float32 else f" In {dtype} a near-tie may fall either way; compare with --dtype float32."
    return f"prompt {number + 1}, new token {at + 1}: paged_attn gives {ours}, transformers' generate() gives {theirs}.{hint}"


def _token(llm: LLM, tokens: list[int], at: int) -> str:
    if at >= len(tokens):
        return "no further token"
    return str(tokens[at]) if llm.tokenizer is None else f"{tokens[at]} ({token_text(llm, tokens[at])})"
