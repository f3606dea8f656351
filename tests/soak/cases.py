"""Requests and what must come of them: trees of shared prefixes, every way to sample and to stop, and prompts that are refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import NoRepeatNGramLogitsProcessor, PreTrainedModel

from paged_attn import SamplingParams
from tests.engine.models import POISON, tokenizer
from tests.soak.oracle import Said, say
from tests.tiny_models import COMMON, VOCAB

NEW = 24
DERIVED = 16  # a prompt may go on with so many tokens of its own answer
POSITIONS: int = COMMON["max_position_embeddings"]
LOGPROB_ERROR = 2e-3
NEVER = frozenset({0, POISON})  # the padding, which is not text, and the token that gives NaN
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3},
    {"temperature": 1.4, "min_p": 0.05},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    {"temperature": 1.0, "presence_penalty": 0.7},
    {"logits_processors": (NoRepeatNGramLogitsProcessor(2),)},
    {"logit_bias": {5: 4.0, 40: -100.0, 61: 2.5}, "temperature": 0.8},
    {"regex": "[a-f]{2,9}(-[0-9]{1,4}){1,3}", "temperature": 1.0},
    {"regex": "([A-Z][a-z]{1,3} ?){2,12}"},
)
BAD: tuple[tuple[Any, dict[str, Any]], ...] = (
    ([], {}),
    ([VOCAB], {}),
    ([1, -1], {}),
    ([1] * (POSITIONS + 1), {}),
    (["a"], {}),
    (None, {}),
    ([1, 2], {"max_new_tokens": -1}),
    ([1, 2], {"stop": ("",)}),
    ([1, 2], {"temperature": float("nan")}),
    ([1, 2], {"top_p": 0.0}),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a request. `tokens` and `text` are what its events brought; `logprobs` those of the tokens."""

    tokens: Sequence[int]
    text: str
    reason: str | None
    stop_reason: int | str | None = None
    logprobs: Sequence[float] | None = None
    error: str = ""


@dataclass(frozen=True)
class Case:
    """A request and its outcome. `nan`: it ends with an error instead. `free`: nobody knows its tokens (no seed)."""

    prompt: list[int]
    params: SamplingParams
    expected: Outcome
    nan: bool = False
    free: bool = False

    def num_pages(self, page_size: int) -> int:
        """Pages that the request needs in the end: its last token is never attended to."""
        return -(-(len(self.prompt) + max(self.num_new - 1, 0)) // page_size)

    @property
    def num_new(self) -> int:
        """How many tokens it may get: those that the model's positions leave it."""
        return min(self.params.max_new_tokens, POSITIONS + 1 - len(self.prompt))

    def check(self, got: Outcome, cut: bool = False) -> None:
        """AssertionError unless `got` is as expected, or, with `cut`, a beginning of it."""
        where = f"\n  case {self}\n  got  {got}"
        if self.nan and not (cut and got.reason == "cancelled"):
            assert (got.reason, list(got.tokens)) == ("error", []) and "NaN or infinite" in got.error, f"NaN was not reported{where}"
        elif self.free:
            assert cut or got.reason in ("length", "stop"), f"wrong end{where}"
            assert len(got.tokens) <= self.num_new and all(0 <= t < VOCAB for t in got.tokens), f"wrong tokens{where}"
            assert got.reason != "length" or len(got.tokens) == self.num_new, f"too few tokens{where}"
        elif cut and got.reason in ("cancelled", None):
            assert list(got.tokens) == list(self.expected.tokens[: len(got.tokens)]), f"wrong tokens before the end{where}"
            both = min(len(got.text), len(self.expected.text))  # what was held back for a stop string comes with a cancel
            assert got.text[:both] == self.expected.text[:both], f"wrong text{where}"
        else:
            assert list(got.tokens) == list(self.expected.tokens), f"wrong tokens{where}"
            ends = (got.text, got.reason, got.stop_reason), (self.expected.text, self.expected.reason, self.expected.stop_reason)
            assert ends[0] == ends[1], f"wrong end{where}"
        if got.logprobs is not None and not (self.free or self.nan):
            wanted = list(self.expected.logprobs or ())[: len(got.tokens)]
            assert len(got.logprobs) == len(wanted), f"wrong number of log-probabilities{where}"
            assert all(abs(a - b) < LOGPROB_ERROR for a, b in zip(got.logprobs, wanted, strict=True)), f"wrong log-probabilities{where}"


def ending(said: Said, params: SamplingParams) -> Outcome:
    """Where an answer ends, worked out from the whole of it. Every token is one character here."""
    text, end = tokenizer().decode(list(said.tokens)), min(params.max_new_tokens, len(said.tokens))
    for n in range(1, end + 1):
        stops = [stop for stop in params.stop if text[:n].endswith(stop)]
        if stops:
            longest = max(stops, key=len)
            return Outcome(said.tokens[:n], text[: n - len(longest)], "stop", longest, said.logprobs[:n])
        if said.tokens[n - 1] in params.stop_token_ids:
            return Outcome(said.tokens[:n], text[:n], "stop", said.tokens[n - 1], said.logprobs[:n])
    if said.is_whole and end == len(said.tokens):
        return Outcome(said.tokens, text, "stop", None, said.logprobs)
    return Outcome(said.tokens[:end], text[:end], "length", None, said.logprobs[:end])


class Book:
    """Prompts of one round, and what a model says to them.

    Args:
        with_nan: some cases hold the token POISON, or may choose it.
    """

    def __init__(self, model: PreTrainedModel, rng: random.Random, with_nan: bool = True) -> None:
        self.model, self.with_nan = model, with_nan
        stems = [self._ids(rng, n) for n in (16, 9, 25, rng.randint(40, 70))]
        shared = [rng.choice(stems) + self._ids(rng, rng.randint(1, 12)) for _ in range(10)]
        lone = [self._ids(rng, n) for n in (1, 2, 5, 17, 32, rng.randint(100, 200), rng.randint(POSITIONS - 12, POSITIONS))]
        self.prompts = [*shared, *stems, *[stem[:5] for stem in stems[:2]], *lone]
        self._greedy = [(prompt, self.say(prompt)) for prompt in self.prompts]
        self._sampled: list[tuple[list[int], dict[str, Any], Said]] = []
        while len(self._sampled) < 8 or not any(len(said.tokens) > NEW // 2 for _, _, said in self._sampled):
            assert len(self._sampled) < 64, "no sampled answer is firm enough to be an oracle"
            prompt, settings = rng.choice(self.prompts[:-2]), {**rng.choice(SAMPLED), "seed": rng.randrange(2**40)}
            self._sampled.append((prompt, settings, self.say(prompt, **settings)))

    @staticmethod
    def _ids(rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(1, POISON) for _ in range(length)]

    def say(self, prompt: list[int], **settings: Any) -> Said:
        most = min(NEW + DERIVED, POSITIONS + 1 - len(prompt))
        return say(self.model, prompt, SamplingParams(max_new_tokens=most, **settings), NEVER)

    def case(self, rng: random.Random) -> Case:
        kind = rng.random()
        if kind < 0.04 and self.with_nan:
            return self._nan(rng)
        if kind < 0.08 and self.with_nan:  # behind its end an overlapping step may compute POISON
            prompt = rng.choice(self.prompts)
            params = SamplingParams(max_new_tokens=rng.randint(1, NEW), temperature=1.0, stop_token_ids=(POISON,))
            return Case(prompt, params, Outcome([], "", None), free=True)
        if kind < 0.3:
            prompt, settings, said = rng.choice(self._sampled)
        else:
            (prompt, said), settings = rng.choice(self._greedy), {}
            if (more := rng.choice([0, 0, rng.randint(1, DERIVED)])) and len(said.tokens) > more:  # a conversation that goes on
                prompt = [*prompt, *said.tokens[:more]]
                said = Said(said.tokens[more:], said.logprobs[more:])
        params = self._params(rng, said, settings)
        return Case(prompt, params, replace(ending(said, params), logprobs=said.logprobs))

    def _nan(self, rng: random.Random) -> Case:
        prompt = rng.choice([p for p in self.prompts if len(p) < POSITIONS])
        at = rng.choice([len(prompt), rng.randint(0, len(prompt))])
        params = SamplingParams(max_new_tokens=rng.randint(1, NEW))
        return Case([*prompt[:at], POISON, *prompt[at:]], params, Outcome([], "", "error"), nan=True)

    @staticmethod
    def _params(rng: random.Random, said: Said, settings: dict[str, Any]) -> SamplingParams:
        firm = min(NEW, len(said.tokens))
        new = min(rng.choice([0, 1, 2, 7, NEW, NEW]), firm)
        chosen: dict[str, Any] = {"max_new_tokens": new, "logprobs": rng.choice([None, None, 0, 2]), **settings}
        if firm > 4 and (kind := rng.choice(["", "", "text", "token", "both", "absent"])):
            text, at = tokenizer().decode(list(said.tokens)), rng.randrange(firm - 3)
            if kind in ("text", "both"):
                chosen["stop"] = (text[at : at + rng.randint(1, 3)], text[at + 1 : at + 2] + "\t")  # the other one is held back in vain
            if kind in ("token", "both"):
                chosen["stop_token_ids"] = (said.tokens[at], POISON)
            if kind == "absent":
                chosen["stop"] = (text[-2:] + "\t",)
        return SamplingParams(**chosen)
