"""How one request's tokens are chosen and when it stops."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from numbers import Integral, Real
from typing import Any

from paged_attn.engine.setting_names import OTHER_PARAM, SAME_PARAM, familiar, with_hint
from paged_attn.shown import is_utf8, shown
from paged_attn.truncation import checked_truncation

LogitsProcessor = Callable[[Any, Any], Any]  # (input_ids [1, T], scores [1, V]) -> scores; tensors
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_ANSWERS = 1024
GUIDES = ("json_schema", "regex", "grammar")
MAX_GUIDE_BYTES = 256 << 10
MIN_TEMPERATURE = 1e-6  # below this float32 logits / temperature may overflow
SEED_LIMIT = 2**64
ALL_TOKENS = 2**31 - 1  # above any vocabulary
NEW_TOKENS = "0 asks for no new token, None for as many as there is room for"


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling settings, checked on construction. What is not stated is as the checkpoint's generation_config says (see
    `LLM.default_params`), and as below where that says nothing: greedy decoding.

    Attributes:
        max_new_tokens: at most so many new tokens; None means as many as model and pool have room for (max_model_len); 0 means none, with
            finish_reason "length"; the prompt is scored if that is asked for.
        min_tokens: end tokens and `stop_token_ids` may not come, and `stop` is not looked for, before there are so many new tokens.
        n: how many answers to the prompt; with a seed, answer i has the seed plus i.
        temperature: 0 is greedy; else logits are divided by it.
        top_k: keep the k most likely tokens (and those tied with the last of them); 0 or -1 turns it off.
        top_p: keep the smallest set of most likely tokens whose probability reaches it; 1 turns it off.
        min_p: drop tokens less likely than min_p times the most likely one; 0 turns it off.
        repetition_penalty: logits of tokens in prompt or output are divided (positive) or multiplied (negative) by it.
        frequency_penalty: taken from a token's logit for each time that the output has it.
        presence_penalty: taken from the logit of every token that the output has.
        logits_processors: functions of (input_ids [1, T] int64, scores [1, V] float32) that return scores, such as those of transformers;
            called after the penalties with all tokens so far. They need the host, so that steps do not overlap while one is in use.
        seed: None or -1 draws from entropy. A request's tokens depend on it, and on nothing else in the batch.
        stop_token_ids: a new token among these ends the request.
        stop: text that ends the request; a single str is taken as one stop string.
        include_stop_str_in_output: the text ends after the stop string, and not before it.
        skip_special_tokens: the text is without special tokens.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: None for none; k for each new token's log-probability and the k most likely tokens with theirs; -1 for all tokens.
        prompt_logprobs: the same of each token of the prompt but the first, given those before it. The prefix cache has no logits, and such
            a request takes nothing from it that is to be scored.
        prompt_logprobs_start: the first token of the prompt that is scored, as a number from 0; those before it get None.
        logit_bias: {token id: what is added to its logit, -100 to 100}, before penalties; kept as pairs.
        allowed_token_ids: the only tokens that may come; the model's end token ends an answer only if it is among them. None: all may.
        truncate_prompt_tokens: of a longer prompt only the last so many tokens count, of a text's those that the tokenizer put around it
            included; -1: as many as there is room for beside max_new_tokens. None: a prompt that is too long is refused.
        bad_words: texts, or sequences of token ids, that may not come: the last token of one may not follow those before it, be they in
            the prompt or in the answer. A text is meant with and without a space before it.
        json_schema: the answer is JSON of this schema (a mapping, or its text); kept as text.
        regex: the whole answer matches this regular expression (of Rust's `regex`, without anchors).
        grammar: the answer follows this context-free grammar, in the dialect of Lark that llguidance reads, or in llama.cpp's GBNF.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value outside its range.

    The filters mean what they mean in transformers' `generation/logits_process.py` (5.23); frequency and presence penalties what they mean
    in OpenAI's API. At most one of `json_schema`, `regex` and `grammar` may be given; they need llguidance and a tokenizer. What
    they do not allow is forbidden before a token is chosen; the answer ends when nothing can follow, or with an end token where it may. Cut
    at `max_new_tokens` it need not be whole. Like logits processors they need the host.
    """

    max_new_tokens: int | None = 128
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
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    n: int = 1
    min_tokens: int = 0
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "max_new_tokens": None if self.max_new_tokens is None else _whole("max_new_tokens", self.max_new_tokens, NEW_TOKENS),
            "min_tokens": _whole("min_tokens", self.min_tokens, "0 lets a request end at once"),
            "n": _count(self.n),
            "temperature": _temperature(self.temperature),
            "top_k": 0 if self.top_k == -1 else _whole("top_k", self.top_k, "0 or -1 turns top-k off"),
            "top_p": _number("top_p", self.top_p, "0 < top_p <= 1", "1 turns top-p off", positive=True, high=1.0),
            "min_p": _number("min_p", self.min_p, "0 <= min_p <= 1", "0 turns min-p off", high=1.0),
            "repetition_penalty": _number(
                "repetition_penalty", self.repetition_penalty, "a finite number > 0", "1 turns it off", positive=True
            ),
            "frequency_penalty": _penalty("frequency_penalty", self.frequency_penalty),
            "presence_penalty": _penalty("presence_penalty", self.presence_penalty),
            "logit_bias": _biases(self.logit_bias),
            "truncate_prompt_tokens": checked_truncation(self.truncate_prompt_tokens),
            "bad_words": _bad_words(self.bad_words),
            "allowed_token_ids": _allowed_ids(self.allowed_token_ids),
            "logits_processors": _processors(self.logits_processors),
            "seed": None if self.seed is None or self.seed == -1 else _seed(self.seed),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
            "stop": _stop_strings(self.stop),
            "logprobs": _count_of_likely("logprobs", self.logprobs),
            "prompt_logprobs": _count_of_likely("prompt_logprobs", self.prompt_logprobs),
            "prompt_logprobs_start": _whole("prompt_logprobs_start", self.prompt_logprobs_start, "0 scores the whole prompt"),
            "json_schema": None if self.json_schema is None else _json_schema(self.json_schema),
        }
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}: got {shown(value)}; allowed: True or False; pass a bool")
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen
        self._check_guide()
        if self.max_new_tokens is not None and self.min_tokens > self.max_new_tokens:
            raise ValueError(f"min_tokens: got {self.min_tokens}; allowed: at most max_new_tokens, which is {self.max_new_tokens}")

    @property
    def stated(self) -> frozenset[str]:
        """The names of what was given, by our names; the others have the default."""
        stated: frozenset[str] = self.__dict__["_stated"]
        return stated

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These, and what they do not state as `defaults` state it."""
        taken = defaults.stated - self.stated
        if self.guide is not None:
            taken -= {"ignore_eos", "min_tokens"}  # when such an answer ends is not for a default to say
        if not taken:
            return self
        return self._with(_stated=self.stated | taken, **{name: getattr(defaults, name) for name in taken})

    def changed(self, **values: Any) -> SamplingParams:
        """The same with other values, which are checked; what neither states stays unstated."""
        return SamplingParams(**{**{name: getattr(self, name) for name in self.stated}, **values})

    def with_seed(self, seed: int) -> SamplingParams:
        """The same with another seed of 0 <= seed < 2**64. All else was checked and is shared."""
        return self._with(seed=seed)

    def answers(self, count: int | None = None) -> list[SamplingParams]:
        """The params of each of `n` answers (or of `count`): of one answer each, with a seed of its own if there is one."""
        count = self.n if count is None else count
        one = self if self.n == 1 else self._with(n=1)
        return [one if number == 0 or self.seed is None else one.with_seed((self.seed + number) % SEED_LIMIT) for number in range(count)]

    def _with(self, **values: Any) -> SamplingParams:
        """The same with other values, which were checked."""
        other = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(other, name, value)
        return other

    def _check_guide(self) -> None:
        for name in ("regex", "grammar"):
            if not isinstance(value := getattr(self, name), str | None):
                raise TypeError(f"{name}: got {shown(value)}; allowed: a str; None turns it off")
            if value is not None:
                _check_bytes(name, value)
        given = [name for name in GUIDES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: got one beside {given[0]}; allowed: one of {', '.join(GUIDES)}; leave the others out")
        if given and self.ignore_eos:
            raise ValueError(f"ignore_eos: got True beside {given[0]}; allowed: False; such an answer may end with an end token only")
        if given and self.min_tokens:
            raise ValueError(f"min_tokens: got {self.min_tokens} beside {given[0]}; allowed: 0; {given[0]} says when the answer may end")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def guide(self) -> tuple[str, str] | None:
        """Which of the ways to guide the answer is used, and its text."""
        return next(((name, text) for name in GUIDES if (text := getattr(self, name)) is not None), None)

    @property
    def needs_host(self) -> bool:
        """A token can only be chosen when the host knows all those before it."""
        return bool(self.logits_processors) or self.guide is not None

    @property
    def has_limit(self) -> bool:
        """Which tokens may be drawn depends on their order."""
        return self.top_k > 0 or self.top_p < 1.0


_by_its_own_names = SamplingParams.__init__
_NAMES = SamplingParams.__dataclass_fields__.keys()
_NONE_IS_NONE = frozenset({"stop", "stop_token_ids", "bad_words", "logit_bias", "logits_processors"})  # vLLM's default for them is None


@functools.wraps(_by_its_own_names)
def _by_familiar_names_too(self: SamplingParams, *args: Any, **given: Any) -> None:
    if not given.keys() <= _NAMES:
        given = familiar(given, SAME_PARAM)
        for name in given:
            if name not in _NAMES:
                named = with_hint(name, [*_NAMES, *SAME_PARAM], OTHER_PARAM)
                raise TypeError(f"SamplingParams has no {named}; known: {', '.join(_NAMES)}")
    given = {name: value for name, value in given.items() if value is not None or name not in _NONE_IS_NONE}
    object.__setattr__(self, "_stated", frozenset(given).union(islice(_NAMES, len(args))))
    _by_its_own_names(self, *args, **given)


# Where these names were given to something else.
INTO_PARAMS = {name: f"it is a request's: SamplingParams({name}=...)" for name in (*_NAMES, *SAME_PARAM)} | OTHER_PARAM
SamplingParams.__init__ = _by_familiar_names_too  # type: ignore[method-assign]


def _whole(name: str, value: object, hint: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: got {shown(value)} ({type(value).__name__}); allowed: an int >= 0; {hint}")
    if value < 0:
        raise ValueError(f"{name}: got {shown(value)}; allowed: an int >= 0; {hint}")
    return int(value)


def _count(value: object) -> int:
    count = _whole("n", value, "1 asks for one answer")
    if not 1 <= count <= MAX_ANSWERS:
        raise ValueError(f"n: got {shown(count)}; allowed: 1 to {MAX_ANSWERS}; 1 asks for one answer")
    return count


def _count_of_likely(name: str, value: object) -> int | None:
    if value is None or (isinstance(value, Integral) and value == -1):
        return None if value is None else ALL_TOKENS
    return _whole(name, value, "None asks for none, -1 for those of all tokens")


def _number(
    name: str, value: object, allowed: str, hint: str, *, positive: bool = False, low: float = 0.0, high: float = math.inf
) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: got {shown(value)} ({type(value).__name__}); allowed: {allowed}; {hint}")
    number = float(value)
    if not math.isfinite(number) or not low <= number <= high or (positive and number == 0.0):
        raise ValueError(f"{name}: got {number}; allowed: {allowed}; {hint}")
    return number


def _penalty(name: str, value: object) -> float:
    allowed = f"{-MAX_PENALTY} to {MAX_PENALTY}, as in OpenAI's API"
    return _number(name, value, allowed, "0 turns it off", low=-MAX_PENALTY, high=MAX_PENALTY)


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    allowed, hint = f"{{token id: number from {-MAX_BIAS:g} to {MAX_BIAS:g}}}, as in OpenAI's API", "{} turns it off"
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (tuple, list)) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError(f"logit_bias: got {shown(value)}; allowed: {allowed}; {hint}")
    for token, bias in pairs:
        _whole("logit_bias", token, "keys are ids of the model's tokenizer")
        if isinstance(bias, bool) or not isinstance(bias, Real):
            raise TypeError(f"logit_bias: got {shown(bias)} for token {token}; allowed: {allowed}; {hint}")
        if not -MAX_BIAS <= float(bias) <= MAX_BIAS:  # NaN is not, either
            raise ValueError(f"logit_bias: got {float(bias)} for token {token}; allowed: {allowed}; {hint}")
    return tuple(sorted({int(token): float(bias) for token, bias in pairs}.items()))


def _allowed_ids(value: object) -> tuple[int, ...] | None:
    allowed = "a tuple, list or set of token ids, at least one; None allows all"
    if value is None:
        return None
    if not isinstance(value, (tuple, list, set, frozenset)):
        raise TypeError(f"allowed_token_ids: got {shown(value)}; allowed: {allowed}; write (id,) for one")
    if not value:
        raise ValueError(f"allowed_token_ids: got {shown(value)}; allowed: {allowed}")
    return tuple(sorted({_whole("allowed_token_ids", token, "take ids from the model's tokenizer") for token in value}))


def _bad_words(value: object) -> tuple[str | tuple[int, ...], ...]:
    allowed = "texts, or lists of token ids, in a tuple or list"
    if isinstance(value, str) or not isinstance(value, (tuple, list)):
        raise TypeError(f"bad_words: got {shown(value)}; allowed: {allowed}; write (text,) for one")
    words: list[str | tuple[int, ...]] = []
    for word in value:
        if not isinstance(word, (str, tuple, list)):
            raise TypeError(f"bad_words: got {shown(word)} in {shown(value)}; allowed: {allowed}; write [id] for one token")
        if not word or (isinstance(word, str) and not word.strip()):
            raise ValueError(f"bad_words: got {shown(word)} in {shown(value)}; allowed: {allowed}, none of them empty; leave it out")
        if isinstance(word, str) and not is_utf8(word):
            raise ValueError(f"bad_words: got {shown(word)}, which holds half of a surrogate pair; allowed: text; send both halves or none")
        words.append(word if isinstance(word, str) else tuple(_whole("bad_words", token, "take ids from the tokenizer") for token in word))
    return tuple(words)


def _json_schema(value: object) -> str:
    allowed, hint = "a mapping, or a text that is a JSON object", "a pydantic model has model_json_schema()"
    if not isinstance(value, (str, Mapping)):
        raise TypeError(f"json_schema: got {shown(value)} ({type(value).__name__}); allowed: {allowed}; {hint}")
    if isinstance(value, str):
        _check_bytes("json_schema", value)
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        if text is value and not isinstance(json.loads(text), dict):
            raise ValueError("not an object")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema: got what is not a JSON object ({error}); allowed: {allowed}; {hint}") from error
    _check_bytes("json_schema", text)
    return text


def _check_bytes(name: str, text: str) -> None:
    if len(text) > MAX_GUIDE_BYTES or len(text.encode(errors="surrogatepass")) > MAX_GUIDE_BYTES:
        raise ValueError(
            f"{name}: got {len(text):,} characters; allowed: at most {MAX_GUIDE_BYTES:,} bytes; leave out what no answer needs"
        )


def _processors(value: object) -> tuple[LogitsProcessor, ...]:
    if callable(value) and not isinstance(value, (list, tuple)):
        raise TypeError(f"logits_processors: got {shown(value)}; allowed: a tuple or list of functions; write (processor,) for one")
    if not isinstance(value, (tuple, list)) or not all(map(callable, value)):
        raise TypeError(f"logits_processors: got {shown(value)}; allowed: a tuple or list of functions (input_ids, scores) -> scores")
    return tuple(value)


def _temperature(value: object) -> float:
    allowed, hint = f"0 or a finite number >= {MIN_TEMPERATURE}", "0 is greedy, 1 samples from the model's distribution"
    number = _number("temperature", value, allowed, hint)
    if 0.0 < number < MIN_TEMPERATURE:
        raise ValueError(f"temperature: got {number}; allowed: {allowed}; {hint}")
    return number


def _seed(value: object) -> int:
    seed = _whole("seed", value, "None or -1 draws a seed from entropy")
    if seed >= SEED_LIMIT:
        raise ValueError(f"seed: got {shown(seed)}; allowed: 0 <= seed < 2**64; reduce it modulo 2**64")
    return seed


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list, set, frozenset)):
        raise TypeError(f"stop_token_ids: got {shown(value)}; allowed: a tuple, list or set of ints; write (id,) for one")
    ids = tuple(_whole("stop_token_ids", item, "take ids from the model's tokenizer") for item in value)
    return tuple(sorted(ids)) if isinstance(value, (set, frozenset)) else ids


def _stop_strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"stop: got {shown(value)}; allowed: a str, or a tuple or list of str; write ('\\n',) for one")
    for item in value:
        if not isinstance(item, str):
            raise TypeError(f"stop: got {shown(item)} in {shown(value)}; allowed: str; token ids go into stop_token_ids")
        if not item:
            raise ValueError(f"stop: got an empty string in {shown(value)}; allowed: non-empty strings; () means no stop")
    return tuple(value)
