"""The result of a chat, whole or as a stream of events."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from paged_attn.chat.answers.answer_form import AnswerForm, finish_reason
from paged_attn.chat.parts import ChatMessage, Part
from paged_attn.engine.requests.outputs import Completion


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
