"""Several conversations at once, for `LLM.chat`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from paged_attn.chat.answers.answer_form import AnswerForm, AnswerReader, finish_reason, read_event
from paged_attn.chat.completion import ChatEvent
from paged_attn.chat.errors import ChatError
from paged_attn.chat.parts import ToolCall
from paged_attn.chat.request import ChatRequest
from paged_attn.engine.requests.outputs import TokenEvent
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.shown import shown

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
        allowed = 'a list of messages such as {"role": "user", "content": "Hello"}, or a list of such lists'
        raise ChatError(f"messages: got {shown(messages)}; allowed: {allowed}", "messages")
    several = [isinstance(each, (list, tuple)) for each in messages]
    if any(several) and not all(several):
        raise ChatError("messages: got messages and lists of messages mixed; give one conversation, or a list of them", "messages")
    if any(several) and not all(messages):
        raise ChatError(f"messages: conversation {list(map(bool, messages)).index(False)} is empty; give at least one message", "messages")
    return list(messages) if any(several) else [messages]


def chat_events(events: Generator[TokenEvent], forms: Sequence[AnswerForm]) -> Iterator[ChatEvent]:
    """What the events of a stream say, read by the form of each conversation. Closing it closes `events`."""
    reader = ChatEventReader(forms)
    try:
        for event in events:
            yield from reader.feed(event)
    finally:
        events.close()


class ChatEventReader:
    """Events of a stream in, what they say out.

    Args:
        forms: of the answers to each conversation; to be there when the first event of the conversation comes.
    """

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
