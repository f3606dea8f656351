"""docs/troubleshooting.md: the messages that it explains are those that the code gives."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.test_layout import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
TITLE = "| message | meaning | what to do |"
FEWEST, IN_A_ROW = 3, 4  # words: of fewer a message is not known again; so many of a longer one are in the code, others may be filled in
ROOMS = ("attn_ops", "backends", "capture", "passes", "paged_attn")


def said(page: str) -> list[str]:
    """What lies between dots in the messages of the tables' first column, if that is some words."""
    parts = []
    for table in page.split(TITLE)[1:]:
        rows = [line for line in table.split("\n\n")[0].splitlines() if line.startswith("| ")]
        messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row.split("|")[1])]
        parts += [part.strip(" :;,'[]") for message in messages for part in message.split("...")]
    return [part for part in parts if len(part.split()) >= FEWEST]


@cache
def code() -> str:
    """The source of all rooms, in which a text that is written as several is one."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return "\n".join(joined(path.read_text(encoding="utf-8")) for path in files)


def joined(source: str) -> str:
    return re.sub(r'"\s+f?"', "", source)


def is_said(part: str, source: str) -> bool:
    """Whether `IN_A_ROW` words of `part` are in the source as they are, or all if it has fewer."""
    words = part.split()
    return any(" ".join(words[i : i + IN_A_ROW]) in source for i in range(max(1, len(words) - IN_A_ROW + 1)))


@pytest.mark.parametrize("part", said(PAGE.read_text(encoding="utf-8")))
def test_every_message_is_one_of_the_code(part: str) -> None:
    assert is_said(part, code()), f"no text of the code has {IN_A_ROW} words in a row of this: change docs/troubleshooting.md"


def test_parts_of_messages_are_read() -> None:
    page = f"{TITLE}\n|---|---|---|\n| `the ... is too long: ...`, `an old word` (a warning) | `not this one` | x |\n\n| `nor this one` |\n"
    assert said(page) == ["is too long", "an old word"]
    source = joined('raise ValueError(f"{name}: the prompt is too "\n    "long")')
    assert is_said("now the prompt is too long", source) and not is_said("an old word", source)
