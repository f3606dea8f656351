"""Items of a conversation, as the Responses API has them, as messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_attn.chat.messages import MAX_CALLS, MAX_PARTS
from paged_attn.server.api.bounds import MAX_MESSAGES, too_many
from paged_attn.server.http.errors import ApiError
from paged_attn.shown import shown

# What an item of each type may have beside its type, its id and its status.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("summary", "content"),
}
# What our answers, or OpenAI's client, put beside them; it changes nothing.
BESIDE = ("type", "id", "status", "encrypted_content", "phase", "parsed_arguments")
ROLES = {"developer": "system"}  # the newer name, which templates do not know
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_of(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Messages for `ChatRequest`. Reasoning, text and calls that follow each other are one message of the assistant; system messages
    that do are one, too.

    Raises:
        ApiError: 400 for anything that is no text and no list of known items; with its place.
    """
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError(400, f"input: got {shown(given)}; allowed: a text, or a list of items", param="input")
    if len(given) > MAX_MESSAGES:
        raise too_many("input", len(given), MAX_MESSAGES, "items")
    for i, item in enumerate(given):
        _add(messages, _checked(item, f"input.{i}"), f"input.{i}")
    return messages


def _checked(item: Any, where: str) -> dict[str, Any]:
    kind = item.get("type") or "message" if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(kind, str) or kind not in FIELDS:
        got = shown(kind if isinstance(item, dict) else item)
        raise ApiError(400, f"{where}: got {got}; allowed: items of type {', '.join(FIELDS)}", param=where)
    known = (*FIELDS[kind], *BESIDE)
    if (other := next((name for name, value in item.items() if name not in known and value not in (None, [], {})), None)) is not None:
        raise ApiError(400, f"{where}: field {shown(other)} is not supported; allowed are {', '.join(FIELDS[kind])}", param=where)
    return {**item, "type": kind}


def _add(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item["type"]
    if kind == "message":
        role = item.get("role")
        role, content = ROLES.get(role, role) if isinstance(role, str) else role, _text(item.get("content"), f"{where}.content")
        last = messages[-1] if messages else {}
        if role == "system" and last.get("role") == "system":
            last["content"] = f"{last['content']}\n\n{content}"
        elif role == "assistant":
            _assistant(messages, unless=("content", "tool_calls"))["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        text = _text(item.get("content") or item.get("summary") or "", f"{where}.content")
        if text:
            _assistant(messages, unless=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = text
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "type": "function", "function": {name: item.get(name) for name in ("name", "arguments")}}
        calls = _assistant(messages).setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS:
            raise ApiError(400, f"{where}: more than {MAX_CALLS} calls follow each other; allowed: at most {MAX_CALLS}", param=where)
        calls.append(call)
    else:
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"), f"{where}.output")})


def _assistant(messages: list[dict[str, Any]], unless: tuple[str, ...] = ()) -> dict[str, Any]:
    """The assistant's message that goes on, or a new one, if the last has one of these already."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in unless):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: got {shown(content)}; allowed: a text, or a list of text parts", param=where)
    if len(content) > MAX_PARTS:
        raise too_many(where, len(content), MAX_PARTS, "parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(400, f"{where}: a part is {shown(kind)}; allowed: parts of type {', '.join(TEXTS)}, with a text", param=where)
    return "".join(part["text"] for part in content)
