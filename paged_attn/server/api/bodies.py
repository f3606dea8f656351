"""Bodies of requests: the fields that completions and chats share, and their translation to the engine's parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, model_validator

from paged_attn.engine.engine import Engine
from paged_attn.engine.sampling_params import MAX_PENALTY, SEED_LIMIT, SamplingParams
from paged_attn.engine.setting_names import OTHER_PARAM
from paged_attn.server.api.fields.answer_forms import ResponseFormat, StructuredOutputs, with_older_names
from paged_attn.server.api.fields.bounds import (
    AllowedTokens,
    BadWords,
    Biases,
    Closed,
    GuideText,
    Name,
    Salt,
    Schema,
    Stop,
    StopTokens,
    bounded,
)
from paged_attn.server.http.errors import ApiError, bad_field, bad_request, not_allowed
from paged_attn.shown import shown
from paged_attn.truncation import Cut, checked_truncation

MAX_LOGPROBS = 20
MAX_SCORES = 1 << 18  # prompt log-probabilities in one answer: 131,072 tokens with logprobs=1
MAX_DIGITS = 12
MAX_N = 128  # OpenAI's limit
MAX_TOP_K = 2**31 - 1  # above any vocabulary
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
PROMPTS: list[Any] = [_TEXT, _IDS, {"type": "array", "items": _TEXT, "minItems": 1}, {"type": "array", "items": _IDS, "minItems": 1}]
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
# Fields of OpenAI's that change nothing here.
IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "prediction"}
)
# Fields that would change the answer: only the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "use n with logprobs and compare"),
    "echo": (NOTHING, "completions have it; leave it out"),
    "suffix": (NOTHING, "put the model's own fill-in-the-middle tokens into the prompt"),
    "tools": (NOTHING, "only chats have them"),
    "tool_choice": ((None, "none", "auto"), "only chats have it"),
    "parallel_tool_calls": ((None, False, True), "only chats have it"),
    "functions": (NOTHING, "give tools, of which functions are the old form"),
    "function_call": ((None, "none", "auto"), "give tool_choice, of which it is the old form"),
    "response_format": ((None, {"type": "text"}), "completions and chats have it; give json_schema, regex or grammar"),
    "modalities": ((None, ["text"]), "leave it out"),
    "audio": (NOTHING, "leave it out"),
    "reasoning_effort": (NOTHING, "only chats have it"),
    "verbosity": (NOTHING, "leave it out"),
    "web_search_options": (NOTHING, "leave it out"),
    # vLLM's, whose defaults clients write out.
    "use_beam_search": (NOTHING, OTHER_PARAM["use_beam_search"]),
    "length_penalty": ((None, 1), OTHER_PARAM["length_penalty"]),
    "spaces_between_special_tokens": ((None, True), OTHER_PARAM["spaces_between_special_tokens"]),
    "add_special_tokens": ((None, False), "a chat's template writes them; completions have it"),
    "include_reasoning": ((None, True), "reasoning comes apart from the content and may be left unread"),
    "documents": (NOTHING, 'give chat_template_kwargs={"documents": ...}, if the template reads them'),
}


class StreamOptions(Closed):
    include_usage: bool | None = Field(None, description="the last event has the usage; default: as continuous_usage_stats")
    continuous_usage_stats: bool | None = Field(None, description="extension: every event has the usage up to it")
    include_obfuscation: bool = False


class SentBody(Closed):
    """What all routes that run something share. `null` is the default, as with OpenAI."""

    model: Name | None = Field(None, description="the served model's name, or none")
    priority: int | None = Field(None, description="extension, where the server allows it: a lower one is more urgent; default 0")
    cache_salt: Salt | None = Field(None, description="extension: prefixes are shared only with requests of the same salt")
    timeout_seconds: float | None = bounded(0.001, None, "extension: the request ends with 504 after so long; at most the server's own")


class Body(SentBody):
    """What completions and chats share."""

    ignored = IGNORED | set(NEUTRAL)
    default_max_tokens: ClassVar[int | None] = None
    logprobs_name: ClassVar[str] = "logprobs"
    limit_name: ClassVar[str] = "max_tokens"
    prompt_name: ClassVar[str] = "prompt"
    format_name: ClassVar[str] = "response_format"
    not_here: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}  # as NEUTRAL: fields, also of other routes, that this one lacks
    codes: ClassVar[Mapping[str, str]] = {}  # of errors for fields that clients know by another one than unsupported_value
    text_at_end: ClassVar[bool] = True  # whole answers are read when they have ended

    max_tokens: int | None = bounded(0)
    temperature: float | None = bounded(0, 10, "default: as the checkpoint says, else 1; 0 is greedy")
    top_p: float | None = bounded(0.001, 1)
    top_k: int | None = bounded(-1, description="extension; 0 or -1 turns it off")
    min_p: float | None = bounded(0, 1, "extension")
    repetition_penalty: float | None = bounded(0.01, 100, "extension")
    frequency_penalty: float | None = bounded(-MAX_PENALTY, MAX_PENALTY)
    presence_penalty: float | None = bounded(-MAX_PENALTY, MAX_PENALTY)
    seed: int | None = bounded(0, SEED_LIMIT - 1)
    logit_bias: Biases | None = Field(None, description="token ids, as texts, and what is added to their logits")
    n: int | None = bounded(1, MAX_N, "how many answers to each prompt; default 1")
    stop: Stop | None = None
    stop_token_ids: StopTokens | None = Field(None, description="extension")
    ignore_eos: bool | None = Field(None, description="extension")
    min_tokens: int | None = bounded(0, description="extension: no answer ends before so many")
    allowed_token_ids: AllowedTokens | None = Field(None, description="extension: the only tokens that may come")
    truncate_prompt_tokens: int | None = bounded(
        -1, description="extension: only the last so many tokens of a longer prompt count; -1: as many as there is room for"
    )
    bad_words: BadWords | None = Field(None, description="extension: texts that may not come")
    include_stop_str_in_output: bool | None = Field(None, description="extension: the text ends after the stop string")
    skip_special_tokens: bool | None = Field(None, description="extension: default true")
    json_schema: Schema | None = Field(None, description="extension: the answer is JSON of this schema")
    regex: GuideText | None = Field(None, description="extension: the answer matches this regular expression")
    grammar: GuideText | None = Field(
        None, description="extension: the answer follows this grammar, in llguidance's dialect of Lark or GBNF"
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="extension: vLLM's name for the three above")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="extension: token_ids and prompt_token_ids in the answer")
    return_tokens_as_token_ids: bool | None = Field(None, description="extension: logprobs call every token token_id:N")

    @model_validator(mode="before")
    @classmethod
    def _neutral_only(cls, values: Any) -> Any:
        neutral = {name: told for name, told in NEUTRAL.items() if name not in cls.model_fields} | dict(cls.not_here)
        for name, (allowed, hint) in neutral.items() if isinstance(values, dict) else ():
            value = values.get(name)
            if not any(value == each and isinstance(value, bool) <= isinstance(each, bool) for each in allowed):
                code = cls.codes.get(name, "unsupported_value")
                raise ApiError(400, f"{name}={shown(value)} is not supported; {hint}", param=name, code=code)
        return values

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, values: Any) -> Any:
        return with_older_names(values) if isinstance(values, dict) else values

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage. Raises ApiError: 400 for stream_options without a stream, or that contradict each other."""
        options = self.stream_options
        if options is None:
            return False
        if not self.stream:
            raise bad_field("stream_options", "allowed only with stream=true")
        if options.continuous_usage_stats and options.include_usage is False:
            raise bad_field("stream_options", "continuous_usage_stats: got true beside include_usage=false; leave one of them out")
        return bool(options.include_usage or options.continuous_usage_stats)

    @property
    def repeats_usage(self) -> bool:
        """Whether every event of a stream has the usage up to it."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def num_answers(self) -> int:
        """How many answers each prompt gets. Raises ApiError: 400 for too few or too many."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_N:
            raise not_allowed("n", n, f"1 to {MAX_N}")
        return n

    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens are wanted with each new token; None if no log-probability is."""
        return None

    def num_prompt_logprobs(self) -> int | None:
        """How many of the most likely tokens are wanted with each token of the prompt; None if the prompt is not scored."""
        return None

    def check_scores(self, num_tokens: int) -> None:
        """Raises ApiError: 400 if scores of prompts of so many tokens together are more than an answer may hold."""
        count = self.num_prompt_logprobs()
        if count is not None and (scores := num_tokens * self.num_answers * (count + 1)) > MAX_SCORES:
            what = f"{num_tokens:,} tokens of prompts with {self.num_answers} answers and {count + 1} log-probabilities each are {scores:,}"
            raise ApiError(
                400, f"{what}; allowed: at most {MAX_SCORES:,}; send fewer prompts at a time, or lower logprobs", param=self.prompt_name
            )

    def schema_of_format(self) -> dict[str, Any] | None:
        """The JSON schema that `format_name` asks for, if it does."""
        return None

    def wanted_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must follow, if any."""
        wanted = self.schema_of_format()
        if wanted is not None and self.json_schema is not None:
            raise bad_field("json_schema", f"got one beside {self.format_name}; give one of them")
        return self.json_schema if wanted is None else wanted

    def wanted_guides(self) -> dict[str, Any]:
        """Those of `json_schema`, `regex` and `grammar` that `SamplingParams` are given. Raises ApiError: 400 for structured_outputs beside
        one of these."""
        all_of_them = {"json_schema": self.wanted_schema(), "regex": self.regex, "grammar": self.grammar}
        given = {name: value for name, value in all_of_them.items() if value is not None}
        if self.structured_outputs is None:
            return given
        if given:
            raise bad_field("structured_outputs", f"got one beside {next(iter(given))}; give one of them")
        return self.structured_outputs.guide()

    def wanted_guide(self) -> tuple[str, str] | None:
        """As `SamplingParams.guide` will be, as far as a chat needs to know: a schema's text, or that there is some other."""
        for name, value in self.wanted_guides().items():
            return name, json.dumps(value) if name == "json_schema" else value
        return None

    def sampling_params(self, room: int, defaults: SamplingParams) -> SamplingParams:
        """The engine's parameters, for one answer.

        Args:
            room: the most new tokens that the model and its pool have room for, for requests that give no limit.
            defaults: what the engine takes for fields that are not given.

        Raises:
            ApiError: 400 in the words of SamplingParams.
        """
        given: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens(room), "min_tokens": self.min_tokens, "temperature": self.temperature,
            "top_p": self.top_p, "top_k": None if self.top_k is None else min(self.top_k, MAX_TOP_K), "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty, "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty, "seed": self.seed, "stop": self._stops(), "ignore_eos": self.ignore_eos,
            "stop_token_ids": self.stop_token_ids, "logprobs": self._logprobs(),
            "logit_bias": self._biases(), "allowed_token_ids": self.allowed_token_ids,
            "bad_words": None if self.bad_words is None else tuple(self.bad_words),
            "include_stop_str_in_output": self.include_stop_str_in_output, "skip_special_tokens": self.skip_special_tokens,
            "prompt_logprobs": self.num_prompt_logprobs(),
            **self.wanted_guides(),
        }  # fmt: skip
        if "temperature" not in defaults.stated and self.temperature is None:
            given["temperature"] = 1.0  # OpenAI's
        if "max_new_tokens" in defaults.stated and defaults.max_new_tokens is not None:
            given["max_new_tokens"] = self.max_new_tokens(min(room, defaults.max_new_tokens))
        try:
            return SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except (ValueError, TypeError) as error:
            name = str(error).partition(":")[0]
            api = {"max_new_tokens": self.limit_name}.get(name, name)
            raise bad_request(ValueError(str(error).replace("max_new_tokens", self.limit_name)), api) from error

    def cut(self, engine: Engine) -> Cut | None:
        """How much is kept of a prompt, if the body says so. Raises ApiError: 400 for a number of tokens that is none."""
        return cut_of(self.truncate_prompt_tokens, engine, self.max_new_tokens(1))

    def max_new_tokens(self, room: int) -> int:
        return self.max_tokens if self.max_tokens is not None else self.default_max_tokens or room

    def _logprobs(self) -> int | None:
        return _checked_count(self.logprobs_name, self.num_logprobs())

    def _biases(self) -> dict[int, float] | None:
        biases = self.logit_bias or {}
        if bad := [token for token in biases if not (token.isascii() and token.isdigit() and len(token) <= MAX_DIGITS)]:
            raise not_allowed("logit_bias", bad[0], "token ids, written as texts")
        return {int(token): bias for token, bias in biases.items()} or None

    def _stops(self) -> tuple[str, ...] | None:
        return ((self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())) or None


def cut_of(most: int | None, engine: Engine, new: int, *, keeps_end: bool = True) -> Cut | None:
    """As `InputProcessor.cut_of`. Raises ApiError: 400 for a number of tokens that is none."""
    try:
        return engine.input_processor.cut_of(checked_truncation(most), new, keeps_end=keeps_end)
    except ValueError as error:
        raise bad_request(error, "truncate_prompt_tokens") from error


class FormattedBody(Body):
    """Of the routes that take OpenAI's response_format, and that score their prompts."""

    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = bounded(
        0, MAX_LOGPROBS, "extension: for each token of the prompt its log-probability and those of so many of the most likely ones"
    )

    def num_prompt_logprobs(self) -> int | None:
        count = _checked_count("prompt_logprobs", self.prompt_logprobs)
        if self.stream and count is not None:
            raise bad_field("prompt_logprobs", "allowed only without stream, where completions have echo")
        return count

    def schema_of_format(self) -> dict[str, Any] | None:
        return None if self.response_format is None else self.response_format.schema_of_answer()


class CompletionBody(FormattedBody):
    """The body of POST /v1/completions."""

    default_max_tokens = 16  # OpenAI's
    prompt: Any = Field(
        description="a text, a list of texts, a list of token ids, or a list of such lists", json_schema_extra={"anyOf": PROMPTS}
    )
    logprobs: int | None = bounded(0, MAX_LOGPROBS)
    add_special_tokens: bool | None = Field(None, description="extension: those that the tokenizer puts around a text; default true")
    echo: bool | None = Field(None, description="the answer begins with the prompt, and its logprobs with the prompt's")

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        wanted = [super().num_prompt_logprobs(), self._logprobs() if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)


def _checked_count(name: str, count: int | None) -> int | None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise not_allowed(name, count, f"0 to {MAX_LOGPROBS}")
    return count


def listed(given: object, param: str = "prompt") -> Sequence[str | list[int]]:
    """A text, token ids, or a list of either, as a list. Only the form is looked at; the engine looks at each id. Raises ApiError: 400 for
    anything else."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if _are_ids(given):
            return [given]
        if all(isinstance(each, str) or (isinstance(each, list) and _are_ids(each)) for each in given):
            return given
    what = f"a {type(given).__name__}" if given is not None else "null"
    if isinstance(given, list):
        what = "a list of other things" if given else "an empty list"
    allowed = "a text, a list of texts, a list of token ids, or a list of such lists"
    raise ApiError(400, f"{param} is {what}; allowed are {allowed}", param=param)


def _are_ids(values: list[Any]) -> bool:
    return all(type(each) is int for each in values)  # excludes bool
