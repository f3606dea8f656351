"""Calls of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and `[TOOL_CALLS]NAME[ARGS]{...}` of newer models."""

from __future__ import annotations

import re
import secrets
import string

from paged_attn.chat.formats.tool_format import (
    SPACE,
    Call,
    Mark,
    Taken,
    ToolFormat,
    calls_of,
    json_calls_grammar,
    load_first_json,
    repeated,
)

OPENING, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_LENGTH = 9  # Mistral's templates refuse other lengths
_HEAD = re.compile(rf"{re.escape(OPENING)}\s*([\w.-]+)(?:{re.escape(CALL_ID)}\w+)?(?:{re.escape(ARGS)})?\s*(?=\{{)")


class MistralFormat(ToolFormat):
    name = "mistral"
    marks = (OPENING, ARGS, CALL_ID)
    openings = (OPENING,)
    endings = "}]"

    def take(self, text: str, ended: bool) -> Taken | None:
        head = _HEAD.match(text)
        if head is None and text[len(OPENING) :].lstrip(SPACE)[:1] not in ("[", "{"):  # a name, maybe; it may begin as a number does
            return Taken((), len(text)) if ended else None
        found = load_first_json(text, len(OPENING) if head is None else head.end())
        if found is None:
            return Taken((), len(text)) if ended else None
        value, end = found
        if head is None:
            return Taken(calls_of(value), end)
        call = Call.of(head[1], value)
        return Taken(() if call is None else (call,), end)

    @staticmethod
    def new_id() -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))

    def grammar(self, several: bool, mark: Mark) -> list[str]:
        calls = mark(OPENING) + ' "[" ' + repeated("body", '"," / ?/', several) + ' "]"'
        return [f"calls: {calls}", *json_calls_grammar(self.tools, "arguments")]


class NamedMistralFormat(MistralFormat):
    """What it reads is the same; enforced calls are of the newer kind."""

    name = "mistral_args"

    def grammar(self, several: bool, mark: Mark) -> list[str]:
        calls = [f'call{i}: {mark(OPENING)} "{tool.name}" {mark(ARGS)} arguments{i}' for i, tool in enumerate(self.tools)]
        rule = f"call: {' | '.join(f'call{i}' for i in range(len(calls)))}"
        return ["calls: " + repeated("call", "/ ?/", several), rule, *calls]
