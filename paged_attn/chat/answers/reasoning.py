"""Separates reasoning from the answer, by the tags of a chat template."""

from __future__ import annotations

from typing import Any, NamedTuple

from paged_attn.chat.errors import not_allowed
from paged_attn.chat.parts import Content, Part, Reasoning
from paged_attn.engine.requests.detokenizer import overlap


class ThinkTags(NamedTuple):
    """What reasoning stands between."""

    opening: str
    closing: str


TAGS = {
    "think": ThinkTags("<think>", "</think>"),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "seed": ThinkTags("<seed:think>", "</seed:think>"),
    "thinking": ThinkTags("<thinking>", "</thinking>"),
}
REASONING_PARSERS = ("auto", "none", *TAGS)


def tags_of(template: str, parser: str) -> ThinkTags | None:
    """The tags that a setting names, or that a template has. Raises ChatError: a name that is none of `REASONING_PARSERS`."""
    if parser == "auto":
        return next((tags for tags in TAGS.values() if tags.closing in template), None)
    if parser not in REASONING_PARSERS:
        raise not_allowed("reasoning_parser", parser, ", ".join(REASONING_PARSERS))
    return TAGS.get(parser)


def begins_inside(tags: ThinkTags, prompt: str, last_message: str | None) -> bool:
    """Whether the answer goes on with reasoning: the template has opened it, or the message that it continues has."""
    if prompt.rstrip().endswith(tags.opening):
        return True
    return last_message is not None and last_message.rfind(tags.opening) > last_message.rfind(tags.closing)


class ReasoningSplitter:
    """Takes reasoning off the beginning of an answer, as it comes. Space around it is left out; all else is kept.

    Tags count at the beginning only: what comes later is content. Reasoning that never ends is reasoning to the last.
    """

    def __init__(self, tags: ThinkTags | None, inside: bool) -> None:
        self._tags = tags
        self._state = "after" if tags is None else "inside" if inside else "before"
        self._held, self._drops_space = "", inside

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        if self._state == "before":
            self._look_for_opening()
        if self._state == "inside":
            parts += self._reasoning()
        if self._state == "after":
            parts += self._content()
        return parts

    def finish(self) -> list[Part]:
        text, self._held = self._held, ""
        if self._state == "inside":
            text = text.rstrip()
            return [Reasoning(text)] if text else []
        return [Content(text)] if text else []

    def _look_for_opening(self) -> None:
        assert self._tags is not None
        text = self._held.lstrip()
        if text.startswith(self._tags.opening):
            self._state, self._held, self._drops_space = "inside", text[len(self._tags.opening) :], True
        elif not self._tags.opening.startswith(text):
            self._state = "after"

    def _reasoning(self) -> list[Part]:
        assert self._tags is not None
        text, closing = self._held, self._tags.closing
        if self._drops_space:
            text = text.lstrip()
        at = text.find(closing)
        if at >= 0:
            self._state, self._drops_space = "after", True
            told, self._held = text[:at].rstrip(), text[at + len(closing) :]
        else:
            sure = text[: len(text) - overlap(text, (closing,))]
            told = sure.rstrip()
            self._held = text[len(told) :]
            self._drops_space &= not told
        return [Reasoning(told)] if told else []

    def _content(self) -> list[Part]:
        text, self._held = self._held, ""
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        return [Content(text)] if text else []


def grammar_of(tags: ThinkTags | None, inside: bool, mark: Any) -> tuple[str, list[str]]:
    """What may come before calls that are enforced: what stands in front of them in a rule, and the rules that it needs. `mark`: from a
    text that may be a token of its own to what a grammar calls it."""
    if tags is None:
        return "", []
    opening, closing = mark(tags.opening), mark(tags.closing)
    # A text that is not a token of its own ends a lexeme; a token that is one is a lexeme by itself.
    thought = f"thought: /(?s:.*)/ {closing}" if closing.startswith("<") else f"thought[suffix={closing}]: /(?s:.*)/"
    return ("thought /\\s{0,4}/ " if inside else f"({opening} thought /\\s{{0,4}}/)? "), [thought]
