"""The base class of tool-call formats, and helpers that several of them share."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from paged_attn.chat.tools import Tool
from paged_attn.engine.requests.detokenizer import overlap
from paged_attn.shown import is_utf8

MAX_CALLS_ENFORCED = 16  # in one answer
SPACE = " \t\r\n"
_DECODER = json.JSONDecoder(strict=False)  # models write line ends into strings
_SPACE = re.compile(f"[{SPACE}]*")
Mark = Callable[[str], str]


class Call(NamedTuple):
    """name: of the tool; arguments: the text of a JSON object; id: the model's own, if it gave one."""

    name: str
    arguments: str
    id: str = ""

    @classmethod
    def of(cls, name: str, arguments: Any, id: str = "") -> Call | None:
        """With arguments as a model gives them, a JSON object or its text; None if they are anything else."""
        text = as_text(arguments)
        return None if text is None else cls(name, text, id)


class Taken(NamedTuple):
    """What a text begins with: calls, or none where it only looked like one; end: where that ends, above 0."""

    calls: Sequence[Call]
    end: int


class ToolFormat:
    """One way to write calls.

    Args:
        tools: those that may be called.

    Attributes:
        marks: texts that a call begins with, and others that special tokens of the format are written as.
        at_beginning: nothing but calls may stand before a call.
        between: characters that may lie between calls, and are dropped.
        endings: a call may end with one of these characters, and with nothing else; "" for any.
    """

    name: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    openings: ClassVar[tuple[str, ...]]
    at_beginning: ClassVar[bool] = False
    between: ClassVar[str] = SPACE
    endings: ClassVar[str]

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tools

    def begins(self, text: str, at_beginning: bool) -> tuple[int, bool]:
        """Where a call begins, and whether that is sure; (length, True) if none does. `at_beginning`: nothing but calls came before the
        text."""
        if self.at_beginning:
            if not at_beginning:
                return len(text), True
            at = space_end(text, 0)
            if at == len(text):
                return 0, False
            if any(text.startswith(opening, at) for opening in self.openings):
                return at, True
            return (at, False) if any(opening.startswith(text[at:]) for opening in self.openings) else (len(text), True)
        found = [at for opening in self.openings if (at := text.find(opening)) >= 0]
        if found:
            return min(found), True
        held = overlap(text, self.openings)
        return len(text) - held, not held

    def knows(self, name: str) -> bool:
        return any(tool.name == name for tool in self.tools)

    def take(self, text: str, ended: bool) -> Taken | None:
        """What a text that begins with an opening holds.

        Args:
            ended: nothing follows the text.

        Returns None if that is not certain yet; never when it has ended.
        """
        raise NotImplementedError

    @staticmethod
    def new_id() -> str:
        """For one call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def grammar(self, several: bool, mark: Mark) -> list[str]:
        """Rules of llguidance's Lark: `calls`, which uses `argumentsN`, the arguments of tool N.

        Args:
            several: whether there may be more than one call.
            mark: from a text that may be a token of its own to what a grammar calls it.
        """
        raise NotImplementedError("enforced calls of this format are plain JSON; see `choose.py`")


def space_end(text: str, at: int) -> int:
    """Where the space ends that begins at a place; that place if there is none."""
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def load_json(text: str) -> Any:
    """Raises ValueError: no JSON, or JSON that nests too deep."""
    try:
        value, end = _DECODER.raw_decode(text.lstrip(SPACE))
        if text.lstrip(SPACE)[end:].strip(SPACE):
            raise ValueError("more than one value")
        return value
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def load_first_json(text: str, at: int) -> tuple[Any, int] | None:
    """The value that begins at the first character from `at` on that is not a space, and its end; None if it is not JSON, or not whole."""
    try:
        value, end = _DECODER.raw_decode(text, space_end(text, at))
    except (ValueError, RecursionError):
        return None
    return value, end


def calls_of(value: Any) -> list[Call]:
    """The calls in {"name": ..., "arguments" or "parameters": {...}}, or a list of such objects; [] if one of them is anything else."""
    values = value if isinstance(value, list) else [value]
    calls = [_call_of(each) for each in values]
    return [call for call in calls if call is not None] if None not in calls else []


def _call_of(value: Any) -> Call | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name or not is_utf8(name):
        return None
    return Call.of(name, value.get("arguments", value.get("parameters")))


def as_text(arguments: Any) -> str | None:
    """The text of a JSON object, which UTF-8 can carry; None for what is none."""
    try:
        if arguments is None or arguments == "":
            return "{}"
        if isinstance(arguments, str) and arguments.strip():
            arguments = load_json(arguments)
        if not isinstance(arguments, Mapping):
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return text if is_utf8(text) else json.dumps(arguments)
    except (ValueError, RecursionError):
        return None


def as_json(calls: Sequence[Call]) -> str:
    """A list of them, as `calls_of` reads it; "" of none."""
    if not calls:
        return ""
    listed = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]
    text = json.dumps(listed, ensure_ascii=False)
    return text if is_utf8(text) else json.dumps(listed)


def json_calls_grammar(tools: Sequence[Tool], key: str) -> list[str]:
    """The rule `body`: one call as a JSON object, its arguments under `key`."""
    rules = [f"body: {' | '.join(f'body{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "{key}": ')
        rules.append(f'body{i}: {head} arguments{i} "}}"')
    return rules


def repeated(what: str, between: str, several: bool) -> str:
    """One, or as many as may be enforced."""
    return f"{what} ({between} {what}){{0,{MAX_CALLS_ENFORCED - 1}}}" if several else what
