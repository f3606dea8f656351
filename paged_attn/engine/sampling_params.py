"""How one request's tokens are chosen and when it stops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

LogitsProcessor = Callable[[Any, Any], Any]  # (input_ids [1, T], scores [1, V]) -> scores; tensors
MAX_PENALTY = 2.0
MIN_TEMPERATURE = 1e-6  # below this float32 logits / temperature may overflow
SEED_LIMIT = 2**64


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling settings, checked on construction. The defaults are greedy decoding.

    Attributes:
        max_new_tokens: at most so many new tokens; 0 means none, with finish_reason "length".
        temperature: 0 is greedy; else logits are divided by it.
        top_k: keep the k most likely tokens (and those tied with the last of them); 0 turns it off.
        top_p: keep the smallest set of most likely tokens whose probability reaches it; 1 turns it off.
        min_p: drop tokens less likely than min_p times the most likely one; 0 turns it off.
        repetition_penalty: logits of tokens in prompt or output are divided (positive) or multiplied (negative) by it.
        frequency_penalty: taken from a token's logit for each time that the output has it.
        presence_penalty: taken from the logit of every token that the output has.
        logits_processors: functions of (input_ids [1, T] int64, scores [1, V] float32) that return scores, such as those of transformers;
            called after the penalties with all tokens so far. They need the host, so that steps do not overlap while one is in use.
        seed: None draws from entropy. A request's tokens depend on it, and on nothing else in the batch.
        stop_token_ids: a new token among these ends the request.
        stop: text that ends the request; a single str is taken as one stop string.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: None for none; k for each new token's log-probability and the k most likely tokens with theirs.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value outside its range.

    The filters mean what they mean in transformers' `generation/logits_process.py` (5.23); frequency and presence penalties what they mean
    in OpenAI's API.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logits_processors: tuple[LogitsProcessor, ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "max_new_tokens": _whole("max_new_tokens", self.max_new_tokens, "0 asks for no new token"),
            "temperature": _temperature(self.temperature),
            "top_k": _whole("top_k", self.top_k, "0 turns top-k off"),
            "top_p": _number("top_p", self.top_p, "0 < top_p <= 1", "1 turns top-p off", positive=True, high=1.0),
            "min_p": _number("min_p", self.min_p, "0 <= min_p <= 1", "0 turns min-p off", high=1.0),
            "repetition_penalty": _number(
                "repetition_penalty", self.repetition_penalty, "a finite number > 0", "1 turns it off", positive=True
            ),
            "frequency_penalty": _penalty("frequency_penalty", self.frequency_penalty),
            "presence_penalty": _penalty("presence_penalty", self.presence_penalty),
            "logits_processors": _processors(self.logits_processors),
            "seed": None if self.seed is None else _seed(self.seed),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
            "stop": _stop_strings(self.stop),
            "logprobs": None if self.logprobs is None else _whole("logprobs", self.logprobs, "None asks for none"),
        }
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos: got {self.ignore_eos!r}; allowed: True or False; pass a bool")
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def has_filter(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def _whole(name: str, value: object, hint: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}); allowed: an int >= 0; {hint}")
    if value < 0:
        raise ValueError(f"{name}: got {value}; allowed: an int >= 0; {hint}")
    return int(value)


def _number(name: str, value: object, allowed: str, hint: str, *, positive: bool = False, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}); allowed: {allowed}; {hint}")
    number = float(value)
    if not math.isfinite(number) or not 0.0 <= number <= high or (positive and number == 0.0):
        raise ValueError(f"{name}: got {number}; allowed: {allowed}; {hint}")
    return number


def _penalty(name: str, value: object) -> float:
    allowed, hint = f"{-MAX_PENALTY} to {MAX_PENALTY}, as in OpenAI's API", "0 turns it off"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}); allowed: {allowed}; {hint}")
    number = float(value)
    if not -MAX_PENALTY <= number <= MAX_PENALTY:  # NaN is not, either
        raise ValueError(f"{name}: got {number}; allowed: {allowed}; {hint}")
    return number


def _processors(value: object) -> tuple[LogitsProcessor, ...]:
    if callable(value) and not isinstance(value, (list, tuple)):
        raise TypeError(f"logits_processors: got {value!r}; allowed: a tuple or list of functions; write (processor,) for one")
    if not isinstance(value, (tuple, list)) or not all(map(callable, value)):
        raise TypeError(f"logits_processors: got {value!r}; allowed: a tuple or list of functions (input_ids, scores) -> scores")
    return tuple(value)


def _temperature(value: object) -> float:
    allowed, hint = f"0 or a finite number >= {MIN_TEMPERATURE}", "0 is greedy, 1 samples from the model's distribution"
    number = _number("temperature", value, allowed, hint)
    if 0.0 < number < MIN_TEMPERATURE:
        raise ValueError(f"temperature: got {number}; allowed: {allowed}; {hint}")
    return number


def _seed(value: object) -> int:
    seed = _whole("seed", value, "None draws a seed from entropy")
    if seed >= SEED_LIMIT:
        raise ValueError(f"seed: got {seed}; allowed: 0 <= seed < 2**64; reduce it modulo 2**64")
    return seed


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list, set, frozenset)):
        raise TypeError(f"stop_token_ids: got {value!r}; allowed: a tuple, list or set of ints; write (id,) for one")
    ids = tuple(_whole("stop_token_ids", item, "take ids from the model's tokenizer") for item in value)
    return tuple(sorted(ids)) if isinstance(value, (set, frozenset)) else ids


def _stop_strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"stop: got {value!r}; allowed: a str, or a tuple or list of str; write ('\n',) for one")
    for item in value:
        if not isinstance(item, str):
            raise TypeError(f"stop: got {item!r} in {value!r}; allowed: str; token ids go into stop_token_ids")
        if not item:
            raise ValueError(f"stop: got an empty string in {value!r}; allowed: non-empty strings; () means no stop")
    return tuple(value)
