"""Translates messages of Anthropic's API, which consist of blocks, to those of `ChatRequest`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from paged_attn.chat.messages import MAX_CALLS, MAX_PARTS
from paged_attn.server.api.fields.bounds import too_many
from paged_attn.server.http.errors import ApiError, bad_field, not_allowed
from paged_attn.shown import shown

# What a block of each type has beside its type and BESIDE, by the role of its message.
USER: Mapping[str, tuple[str, ...]] = {"text": ("text",), "tool_result": ("tool_use_id", "content", "is_error")}
ASSISTANT: Mapping[str, tuple[str, ...]] = {
    "text": ("text",), "thinking": ("thinking", "signature"), "redacted_thinking": ("data",), "tool_use": ("id", "name", "input"),
}  # fmt: skip
TEXT = {"text": USER["text"]}
BLOCKS = {"user": USER, "assistant": ASSISTANT, "system": TEXT}
BESIDE = ("type", "cache_control", "citations", "caller")  # prefixes are cached, whatever it says; the others come back with answers
SEPARATOR = "\n\n"  # between turns of one role, and blocks of a system prompt


def messages_of(messages: list[dict[str, Any]], system: Any) -> list[dict[str, Any]]:
    """Messages for `ChatRequest`. Turns of one role that follow each other are one; results of tools are messages before the text that
    comes with them. Raises ApiError: 400 for roles and blocks that are not served, with their place."""
    found: list[dict[str, Any]] = []
    if system is not None and (text := _text(system, "system", SEPARATOR)):
        found.append({"role": "system", "content": text})
    for i, message in enumerate(messages):
        where = f"messages.{i}"
        role = message.get("role")
        if not isinstance(role, str) or role not in BLOCKS:
            raise not_allowed(f"{where}.role", role, ", ".join(BLOCKS))
        if (other := next((name for name in message if name not in ("role", "content")), None)) is not None:
            raise ApiError(400, f"{where}: field {shown(other)} is not supported; allowed are role, content", param=f"{where}.{other}")
        _ADD[role](found, message.get("content"), f"{where}.content")
    return found


def _user(found: list[dict[str, Any]], content: Any, where: str) -> None:
    texts: list[str] = []
    for block, at in _blocks(content, where, USER):
        if block["type"] == "text":
            texts.append(_string(block, "text", at))
            continue
        _said(found, "user", "".join(texts))
        texts.clear()
        result = block.get("content")
        text = "" if result is None else _text(result, f"{at}.content", "")
        found.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", at), "content": text})
    _said(found, "user", "".join(texts), always=not found or found[-1]["role"] != "tool")


def _assistant(found: list[dict[str, Any]], content: Any, where: str) -> None:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block, at in _blocks(content, where, ASSISTANT):
        if block["type"] == "text":
            texts.append(_string(block, "text", at))
        elif block["type"] == "thinking":
            thoughts.append(_string(block, "thinking", at))
        elif block["type"] == "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise not_allowed(f"{at}.input", given, "a JSON object")
            function = {"name": block.get("name"), "arguments": given}
            calls.append({"id": _string(block, "id", at), "type": "function", "function": function})
    if len(calls) > MAX_CALLS:
        raise too_many(where, len(calls), MAX_CALLS, "calls")
    last = found[-1] if found else {}
    if last.get("role") == "assistant" and "tool_calls" not in last and not thoughts:
        last["content"] = SEPARATOR.join(filter(None, [last["content"], "".join(texts)]))
    else:
        thought = {"reasoning_content": "".join(thoughts)} if thoughts else {}
        found.append({"role": "assistant", "content": "".join(texts), **thought})
    if calls:
        found[-1]["tool_calls"] = calls


def _system(found: list[dict[str, Any]], content: Any, where: str) -> None:
    _said(found, "system", _text(content, where, SEPARATOR), always=True)


_ADD: Mapping[str, Callable[[list[dict[str, Any]], Any, str], None]] = {"user": _user, "assistant": _assistant, "system": _system}


def _said(found: list[dict[str, Any]], role: str, text: str, always: bool = False) -> None:
    if found and found[-1]["role"] == role and text:
        found[-1]["content"] = SEPARATOR.join(filter(None, [found[-1]["content"], text]))
    elif text or always:
        found.append({"role": role, "content": text})


def _text(content: Any, where: str, between: str) -> str:
    return between.join(_string(block, "text", at) for block, at in _blocks(content, where, TEXT))


def _blocks(content: Any, where: str, known: Mapping[str, tuple[str, ...]]) -> list[tuple[dict[str, Any], str]]:
    """The blocks of a content, each with its place; a text is one block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise not_allowed(where, content, "a text, or a list of blocks")
    if len(content) > MAX_PARTS:
        raise too_many(where, len(content), MAX_PARTS, "blocks")
    return [(_block(block, f"{where}.{i}", known), f"{where}.{i}") for i, block in enumerate(content)]


def _block(block: Any, where: str, known: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str) or kind not in known:
        got = shown(kind if isinstance(block, dict) else block)
        raise bad_field(where, f"got a block of type {got}; allowed here: {', '.join(known)}")
    allowed = (*known[kind], *BESIDE)
    if (other := next((name for name, value in block.items() if name not in allowed and value is not None), None)) is not None:
        raise bad_field(where, f"field {shown(other)} is not supported; allowed are {', '.join(known[kind])}")
    return block


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise not_allowed(f"{where}.{name}", value, "a text")
    return value


def length_of_blocks(messages: list[dict[str, Any]], system: Any) -> int:
    """About how many characters there are, of messages that nobody has looked at."""
    left, count = [system, *(message.get("content") for message in messages)], 0
    while left:
        each = left.pop()
        if isinstance(each, str):
            count += len(each)
        elif isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            left += [each.get(name) for name in ("text", "thinking", "content")]
            count += len(json.dumps(each["input"])) if isinstance(each.get("input"), dict) else 0
    return count
