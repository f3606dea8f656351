"""Several conversations at once, for `LLM.chat`, and what callers receive: a completion of each, or its events."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from paged_attn.chat.answers.answer_form import AnswerForm, AnswerReader, finish_reason, read_event
from paged_attn.chat.errors import ChatError, not_allowed
from paged_attn.chat.parts import ChatMessage, Part, ToolCall
from paged_attn.chat.request import ChatRequest
from paged_attn.engine.requests.outputs import Completion, TokenEvent
from paged_attn.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class ChatCompletion(Completion):
    """The next message of one conversation.

    `text` is all that the model wrote, with the marks of reasoning and calls; `finish_reason` may be "tool_calls", too.

    Attributes:
        message: the text taken apart. Append it to the messages and go on.
    """

    message: ChatMessage = field(kw_only=True)

    @classmethod
    def read(cls, completion: Completion, form: AnswerForm) -> ChatCompletion:
        message = form.read(completion.text)
        found: dict[str, Any] = {f.name: getattr(completion, f.name) for f in dataclasses.fields(Completion)}
        found["finish_reason"] = finish_reason(completion.finish_reason, bool(message.tool_calls))
        return cls(**found, message=message)


@dataclass(frozen=True)
class ChatEvent:
    """What `LLM.stream_chat` yields.

    Attributes:
        index, answer: of the conversation, and of the answer to it.
        part: the next piece of content or reasoning, or a whole call; None in an event that tells the end alone.
        finish_reason: None until the last event of a conversation.
    """

    index: int
    part: Part | None
    finish_reason: str | None = None
    answer: int = 0


CHAT_SETTINGS = tuple(each.name for each in fields(ChatRequest) if each.name != "messages")


class Chats(NamedTuple):
    """For each conversation the text of its prompt, the params of its answer, and how that is read."""

    texts: list[str]
    params: list[SamplingParams]
    forms: list[AnswerForm]

    @classmethod
    def of(cls, tokenizer: Any, messages: Any, settings: Mapping[str, Any], params_of: Callable[[int], Sequence[SamplingParams]]) -> Chats:
        """
        Args:
            messages: of one conversation, or a list of conversations.
            settings: other fields of `ChatRequest`.
            params_of: the params of so many answers.

        Raises:
            ChatError: as `ChatRequest.prompt` does, with the conversation if there are several.
        """
        conversations = listed_conversations(messages)
        made = cls([], [], [])
        for i, (conversation, params) in enumerate(zip(conversations, params_of(len(conversations)), strict=True)):
            try:
                prompt = ChatRequest(conversation, **settings).prompt(tokenizer, params.guide)
            except ChatError as error:
                if len(conversations) > 1:
                    error.add_note(f"(conversation {i + 1} of {len(conversations)})")
                raise
            made.texts.append(prompt.text)
            made.params.append(prompt.form.enforced(params))
            made.forms.append(prompt.form)
        return made


def listed_conversations(messages: Any) -> list[Any]:
    """One conversation, or a list of them, as a list; raises ChatError for anything else."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise not_allowed("messages", messages, 'a list of messages such as {"role": "user", "content": "Hello"}, or a list of such lists')
    several = [isinstance(each, (list, tuple)) for each in messages]
    if any(several) and not all(several):
        raise ChatError("messages: got messages and lists of messages mixed; give one conversation, or a list of them", "messages")
    if any(several) and not all(messages):
        raise ChatError(f"messages: conversation {list(map(bool, messages)).index(False)} is empty; give at least one message", "messages")
    return list(messages) if any(several) else [messages]


def chat_events(events: Generator[TokenEvent], forms: Sequence[AnswerForm]) -> Generator[ChatEvent]:
    """What the events of a stream say, read by the form of each conversation. Closing it closes `events`."""
    reader = ChatEventReader(forms)
    with closing(events):
        for event in events:
            yield from reader.feed(event)


class ChatEventReader:
    """Events of a stream in, what they say out. `forms`: of the answers to each conversation; to be there when the first event of the
    conversation comes."""

    def __init__(self, forms: Sequence[AnswerForm] | Mapping[int, AnswerForm]) -> None:
        self._forms = forms
        self._readers: dict[tuple[int, int], AnswerReader] = {}
        self._num_calls: Counter[tuple[int, int]] = Counter()

    def feed(self, event: TokenEvent) -> list[ChatEvent]:
        which = event.index, event.answer
        if which not in self._readers:
            self._readers[which] = self._forms[event.index].reader()
        parts = read_event(self._readers[which], event)
        self._num_calls[which] += sum(isinstance(part, ToolCall) for part in parts)
        told = [ChatEvent(event.index, part, answer=event.answer) for part in parts]
        if event.finish_reason is not None:
            told.append(ChatEvent(event.index, None, finish_reason(event.finish_reason, self._num_calls[which] > 0), event.answer))
        return told
