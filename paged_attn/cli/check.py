"""`--check`: runs the unmodified model's own `generate` on the same prompts, to compare tokens and speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paged_attn.bench.results.compare import equal_start
from paged_attn.cli.token_text import token_text
from paged_attn.engine.llm import LLM
from paged_attn.engine.requests.outputs import Completion
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.tolerances import LOGITS_16_BIT

NEAR = 2 * LOGITS_16_BIT  # apart, in parts of a usual logit: each of two logits may be off by half of it


@dataclass(frozen=True)
class CheckResult:
    """`difference` says where the first token differs, or is None; the seconds are of transformers' one left-padded batch.

    Attributes:
        near_ties: in 16 bits, where a completion parts from the model's at two logits that are nearly equal in the model itself; what
            follows there has another beginning, and is not compared.
    """

    compared_tokens: int
    difference: str | None
    near_ties: list[str]
    padded_batch_tokens: int
    padded_batch_seconds: float

    @property
    def passed(self) -> bool:
        return self.difference is None


def check(llm: LLM, completions: Sequence[Completion], params: SamplingParams) -> CheckResult:
    """Compare every completion with greedy `generate`, one prompt at a time, and time `generate` on all prompts at once."""
    params = params.over(llm.default_params)
    difference, near_ties, compared = None, [], 0
    for number, completion in enumerate(completions):
        expected = own_tokens(llm, [completion.prompt_token_ids], params)[0]
        if isinstance(completion.stop_reason, str):  # a stop string ended ours; generate() was not given it
            expected = expected[: len(completion.token_ids)]
        at = equal_start(completion.token_ids, expected)
        compared += at
        if completion.token_ids == expected:
            continue
        described = _describe(llm, number, completion.token_ids, expected, at)
        if params.repetition_penalty == 1 and _is_near_tie(llm, completion, expected, at):
            near_ties.append(described)
        else:
            difference = difference or described
    started = time.perf_counter()
    padded = own_tokens(llm, [completion.prompt_token_ids for completion in completions], params)
    seconds = time.perf_counter() - started
    return CheckResult(compared, difference, near_ties, sum(map(len, padded)), seconds)


def own_tokens(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    """New tokens of transformers' greedy `generate` for a left-padded batch (of one: no padding), each up to its end token."""
    model: Any = llm.engine.runner.model
    limits, longest = llm.engine.limits, max(map(len, prompts))
    count = llm.engine.input_processor.new_tokens(longest, params)
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


def _describe(llm: LLM, number: int, got: list[int], expected: list[int], at: int) -> str:
    ours, theirs = (_token(llm, tokens, at) for tokens in (got, expected))
    return f"prompt {number + 1}, new token {at + 1}: paged_attn gives {ours}, transformers' generate() gives {theirs}"


def _is_near_tie(llm: LLM, completion: Completion, expected: list[int], at: int) -> bool:
    """Whether the model itself gives both tokens nearly the same logit; in float32 no two count as that."""
    got = completion.token_ids
    if llm.engine.runner.dtype.itemsize > 2 or at >= min(len(got), len(expected)):
        return False
    ids = torch.tensor([[*completion.prompt_token_ids, *got[:at]]], device=llm.engine.runner.device)
    model: Any = llm.engine.runner.model
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    usual = logits[logits.isfinite()].std()
    return bool((logits[got[at]] - logits[expected[at]]).abs() <= NEAR * usual)


def _token(llm: LLM, tokens: list[int], at: int) -> str:
    if at >= len(tokens):
        return "no further token"
    return str(tokens[at]) if llm.tokenizer is None else f"{tokens[at]} ({token_text(llm, tokens[at])})"
