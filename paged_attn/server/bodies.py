"""Bodies of requests: their fields, and the engine's parameters that they become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.server.errors import ApiError, bad_request

MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_BIASES = 1024
MAX_DIGITS = 12
MAX_N = 128  # OpenAI's
MAX_TOP_K = 2**31 - 1  # above any vocabulary
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
# Fields of OpenAI's that change nothing here.
IGNORED = frozenset({"user", "metadata", "service_tier", "prompt_cache_key", "safety_identifier"})
# Fields that would change the answer: only the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "use n with logprobs and compare"),
    "echo": (NOTHING, "put the prompt in front yourself"),
    "suffix": (NOTHING, "put the model's own fill-in-the-middle tokens into the prompt"),
    "tools": (NOTHING, "leave it out"),
    "tool_choice": ((None, "none", "auto"), "leave it out"),
    "parallel_tool_calls": ((None, False, True), "leave it out"),
    "functions": (NOTHING, "leave it out"),
    "function_call": ((None, "none", "auto"), "leave it out"),
    "response_format": ((None, {"type": "text"}), "only chats have it; give json_schema, regex or grammar"),
    "modalities": ((None, ["text"]), "leave it out"),
    "audio": (NOTHING, "leave it out"),
    "prediction": (NOTHING, "leave it out"),
    "reasoning_effort": (NOTHING, "use chat_template_kwargs if the model's template knows it"),
    "verbosity": (NOTHING, "leave it out"),
    "web_search_options": (NOTHING, "leave it out"),
    "store": (NOTHING, "leave it out"),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: bool = False


class Body(BaseModel):
    """What both kinds of requests share. `null` is the default, as with OpenAI."""

    model_config = ConfigDict(extra="forbid", strict=True)
    default_max_tokens: ClassVar[int | None] = None

    model: str | None = Field(None, description="the served model's name, or none")
    max_tokens: int | None = None
    temperature: float | None = Field(None, description="default: 1; 0 is greedy")
    top_p: float | None = None
    top_k: int | None = Field(None, description="extension; 0 turns it off")
    min_p: float | None = Field(None, description="extension")
    repetition_penalty: float | None = Field(None, description="extension")
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token ids, as texts, and what is added to their logits")
    n: int | None = Field(None, description="how many answers to each prompt; default 1")
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(None, description="extension")
    ignore_eos: bool | None = Field(None, description="extension")
    json_schema: dict[str, Any] | None = Field(None, description="extension: the answer is JSON of this schema")
    regex: str | None = Field(None, description="extension: the answer matches this regular expression")
    grammar: str | None = Field(None, description="extension: the answer follows this grammar, in llguidance's dialect of Lark")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="extension: token_ids and prompt_token_ids in the answer")
    priority: int | None = Field(None, description="extension, where the server allows it: a lower one is more urgent; default 0")
    cache_salt: str | None = Field(None, description="extension: prefixes are shared only with requests of the same salt")

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, (allowed, hint) in NEUTRAL.items():
            value = values.get(name)
            if name in cls.model_fields or any(value == each and isinstance(value, bool) <= isinstance(each, bool) for each in allowed):
                continue
            raise ApiError(400, f"{name}={value!r} is not supported; {hint}", param=name, code="unsupported_value")
        return {name: value for name, value in values.items() if name in cls.model_fields or name not in IGNORED | set(NEUTRAL)}

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage.

        Raises:
            ApiError: 400 for stream_options without a stream.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: allowed only with stream=true", param="stream_options")
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_answers(self) -> int:
        """Of each prompt.

        Raises:
            ApiError: 400 for too few or too many.
        """
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_N:
            raise ApiError(400, f"n: got {n}; allowed: 1 to {MAX_N}", param="n")
        return n

    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    def wanted_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer shall follow, if any."""
        return self.json_schema

    def sampling_params(self, room: int) -> SamplingParams:
        """The engine's parameters, for one answer.

        Args:
            room: the most new tokens that the model and its pool have room for, for requests that give no limit.

        Raises:
            ApiError: 400 in the words of SamplingParams.
        """
        given: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens(room), "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p, "top_k": None if self.top_k is None else min(self.top_k, MAX_TOP_K), "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty, "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty, "seed": self.seed, "stop": self._stops(), "ignore_eos": self.ignore_eos,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids), "logprobs": self._logprobs(),
            "logit_bias": self._biases(), "json_schema": self.wanted_schema(), "regex": self.regex, "grammar": self.grammar,
        }  # fmt: skip
        try:
            return SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except (ValueError, TypeError) as error:
            name = str(error).partition(":")[0]
            api = {"max_new_tokens": "max_tokens"}.get(name, name)
            raise bad_request(ValueError(str(error).replace(name, api, 1)), api) from error

    def max_new_tokens(self, room: int) -> int:
        return self.max_tokens if self.max_tokens is not None else self.default_max_tokens or room

    def _logprobs(self) -> int | None:
        count = self.num_logprobs()
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            name = "top_logprobs" if isinstance(self, ChatBody) else "logprobs"
            raise ApiError(400, f"{name}: got {count}; allowed: 0 to {MAX_LOGPROBS}", param=name)
        return count

    def _biases(self) -> dict[int, float] | None:
        biases = self.logit_bias or {}
        if len(biases) > MAX_BIASES:
            raise ApiError(400, f"logit_bias: got {len(biases)} tokens; allowed: at most {MAX_BIASES}", param="logit_bias")
        if bad := [token for token in biases if not (token.isascii() and token.isdigit() and len(token) <= MAX_DIGITS)]:
            raise ApiError(400, f"logit_bias: got {bad[0]!r}; allowed: token ids, written as texts", param="logit_bias")
        return {int(token): bias for token, bias in biases.items()} or None

    def _stops(self) -> tuple[str, ...] | None:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MAX_STOPS:
            raise ApiError(400, f"stop: got {len(stops)} strings; allowed: at most {MAX_STOPS}", param="stop")
        return stops or None


class CompletionBody(Body):
    """The body of POST /v1/completions."""

    default_max_tokens = 16  # OpenAI's
    prompt: Any = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")
    logprobs: int | None = Field(None, description=f"0 to {MAX_LOGPROBS}")

    def num_logprobs(self) -> int | None:
        return self.logprobs


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="answers always follow the schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatBody(Body):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, description="the newer name of max_tokens; default: what there is room for")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description=f"0 to {MAX_LOGPROBS}; needs logprobs=true")
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="extension: variables for the model's chat template")

    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: allowed only with logprobs=true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def max_new_tokens(self, room: int) -> int:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            what = f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}"
            raise ApiError(400, f"{what}; give one of them", param="max_completion_tokens")
        return both.pop() if both else room  # type: ignore[return-value]

    def wanted_schema(self) -> dict[str, Any] | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return self.json_schema
        if self.json_schema is not None:
            raise ApiError(400, "json_schema: got one beside response_format; give one of them", param="json_schema")
        if (wanted.type == "json_schema") != (wanted.json_schema is not None):
            raise ApiError(400, 'response_format: json_schema belongs to type "json_schema", and to it alone', param="response_format")
        return {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_

    def plain_messages(self) -> list[dict[str, Any]]:
        """Messages of role, content (text) and name, as templates expect them.

        Raises:
            ApiError: 400 for what is no text.
        """
        return [_plain_message(message, f"messages.{i}") for i, message in enumerate(self.messages)]


def _plain_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    # What a client got as an answer and sends back holds many empty fields.
    rest = [name for name, value in message.items() if name not in ("role", "content", "name") and value not in (None, [], {})]
    if rest:
        raise ApiError(400, f"{where}: field {rest[0]!r} is not supported; allowed are role, content and name", param=f"{where}.{rest[0]}")
    role, name = message.get("role"), message.get("name")
    if not isinstance(role, str):
        raise ApiError(400, f"{where}.role: got {role!r}; allowed: a text such as 'user'", param=f"{where}.role")
    if name is not None and not isinstance(name, str):
        raise ApiError(400, f"{where}.name: got {name!r}; allowed: a text", param=f"{where}.name")
    content = _content(message.get("content"), f"{where}.content")
    return {"role": role, "content": content, **({} if name is None else {"name": name})}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ApiError(400, f"{where}: got {content!r}; allowed: a text, or a list of text parts", param=where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(400, f"{where}: a part is {kind!r}; allowed: parts of type 'text', with a text", param=where)
    return "".join(part["text"] for part in content)
