"""The output of a request: a `TokenEvent` for each new token, and one `Completion` at its end. The events of a step."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import overload


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Logprob(float):
    """A log-probability: a float with the attributes of vLLM's class of this name.

    Attributes:
        rank: the token's rank, 1 for the most likely; among equals the lower id comes first.
        decoded_token: its text by itself, or `token_id:N` if that is not valid text; None without a tokenizer.
    """

    __slots__ = ("decoded_token", "rank")
    rank: int
    decoded_token: str | None

    def __new__(cls, value: float, rank: int = 0, decoded_token: str | None = None) -> Logprob:
        made = super().__new__(cls, value)
        made.rank, made.decoded_token = rank, decoded_token
        return made

    @property
    def logprob(self) -> float:
        """The value as a plain float."""
        return float(self)


@dataclass(slots=True)  # not frozen: hundreds are made in every step
class TokenEvent:
    """One new token of one request: what a step returns and `LLM.stream` yields.

    Attributes:
        index: of the prompt in the call to `stream`; -1 from `Engine.step`.
        answer: which of the `n` answers to it.
        token_id: None in the last event of a request that ended without a new token.
        text: the text that became final with this token; text that may still change is held back.
        logprob, top_logprobs: as requested by SamplingParams.logprobs.
        finish_reason: None until the last event.
    """

    request_id: str
    token_id: int | None
    text: str
    finish_reason: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    index: int = -1
    answer: int = 0


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt, which has `n` of them.

    Attributes:
        index: the prompt's index in the call; answer: which of its `n` answers this is.
        token_ids: the new ids, including a stop token.
        text: their text, without special tokens and cut before a stop string, unless the params say otherwise.
        finish_reason: "stop", "length" or "cancelled".
        stop_reason: which of the params' stop_token_ids or stop strings ended it; None for the model's own end token, as in vLLM.
        logprobs: per new token a dict from token id to `Logprob`, including the sampled token; None unless requested.
        cached_tokens: prompt tokens whose KV came from the prefix cache.
        prompt_logprobs: per prompt token a dict from token id to `Logprob`, for the token itself and the most likely ones; None for the
            first token and for others that were not scored. None unless requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None
    cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    index: int = 0
    answer: int = 0

    @property
    def num_cached_tokens(self) -> int:
        """`cached_tokens`, as vLLM calls them."""
        return self.cached_tokens

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the new tokens' log-probabilities; None unless they were requested."""
        if self.logprobs is None:
            return None
        return sum(each[token] for each, token in zip(self.logprobs, self.token_ids, strict=True))

    @property
    def outputs(self) -> tuple[Completion]:
        """This completion, for programs that read vLLM's results; `n` answers are `n` separate completions here."""
        return (self,)


class TokenEvents(Sequence[TokenEvent]):
    """Events in order, equal to a list of the same events; adding other events gives a list. The event of a plain token is created when it
    is read: creating hundreds takes longer than everything else done with a step's tokens, and callers that wait for whole texts read none.

    Attributes:
        append: appends an event, or for `TokenEvent(id, token, "")` the pair (id, token).
    """

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __init__(self) -> None:
        self._created: list[TokenEvent] = []  # the first ones, which stay the same objects from now on
        self._appended: list[TokenEvent | tuple[str, int]] = []
        self.append: Callable[[TokenEvent | tuple[str, int]], None] = self._appended.append

    def without(self, request_id: str) -> TokenEvents:
        """The events of the other requests."""
        others = TokenEvents()
        for event in self:
            if event.request_id != request_id:
                others.append(event)
        return others

    def __len__(self) -> int:
        return len(self._appended)

    def __iter__(self) -> Iterator[TokenEvent]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> TokenEvent: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenEvent]: ...
    def __getitem__(self, index: int | slice) -> TokenEvent | list[TokenEvent]:
        return self._all()[index]

    def __add__(self, others: Iterable[TokenEvent]) -> list[TokenEvent]:
        return [*self, *others]

    def __radd__(self, others: Iterable[TokenEvent]) -> list[TokenEvent]:
        return [*others, *self]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, TokenEvents)):
            return NotImplemented
        return len(self) == len(other) and self._all() == list(other)

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> list[TokenEvent]:
        new = islice(self._appended, len(self._created), None)
        self._created += [each if isinstance(each, TokenEvent) else TokenEvent(*each, "") for each in new]
        return self._created
