"""Messages as clients send them, checked, and in the form that chat templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paged_attn.chat.errors import ChatError, not_allowed
from paged_attn.chat.parts import ChatMessage
from paged_attn.shown import shown

MAX_NAME = 256  # characters of a role, a name or an id
MAX_PARTS = 4096  # in one message's content
MAX_CALLS = 128  # in one message
MAX_ARGUMENT_VALUES = 1 << 16  # of all calls together, checked before any of them is built
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_WRITES_ROLES = re.compile(r"""(?:\[['"]role['"]\]|\.role\b)(?!\s*(?:==|!=|in\b|not\b|is\b))""")
FIELDS = ("role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "tool_call_id")
EMPTY: tuple[Any, ...] = (None, [], {}, ())  # a client that sends an answer back sends its empty fields, too


def plain_messages(messages: Sequence[Any], template: str = "") -> list[dict[str, Any]]:
    """Messages for a template: contents are text, arguments of calls are mappings.

    Args:
        messages: mappings, or objects that become mappings (`ChatMessage`, the messages of OpenAI's client). Keys, as in OpenAI's API and
            transformers: role, content (a text, or parts of type "text"), name, tool_calls, tool_call_id, and reasoning_content, which
            vLLM's newer servers call reasoning.
        template: the text of the template that they are for. It may know roles of its own, and "developer", OpenAI's newer name for
            "system". Most templates drop the messages of a role that they do not know.

    Raises:
        ChatError: anything else, with its place.
    """
    budget = [MAX_ARGUMENT_VALUES]
    plain = [_plain(_mapping(message, f"messages.{i}"), f"messages.{i}", budget) for i, message in enumerate(messages)]
    for i, message in enumerate(plain):
        role = message["role"]
        if role == "developer" and role not in template:
            message["role"] = "system"
        elif role not in ROLES and not _knows(template, role):
            raise ChatError(
                f"messages.{i}.role: got {shown(role)}; allowed: {', '.join(ROLES)}, and what the template knows", f"messages.{i}.role"
            )
    return plain


def _knows(template: str, role: str) -> bool:
    """Whether a template names the role, or writes whatever role a message has."""
    return bool(role) and (any(quote + role + quote in template for quote in "'\"") or _WRITES_ROLES.search(template) is not None)


def with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A plain message whose calls have their arguments as the text of a JSON object."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _mapping(message: Any, where: str) -> Mapping[str, Any]:
    if isinstance(message, ChatMessage):
        return message.as_dict()
    if not isinstance(message, Mapping) and hasattr(message, "model_dump"):
        message = message.model_dump()
    if not isinstance(message, Mapping):
        raise not_allowed(where, message, "a mapping with role and content")
    return message


def _plain(message: Mapping[str, Any], where: str, budget: list[int]) -> dict[str, Any]:
    rest = next((name for name, value in message.items() if name not in FIELDS and value not in EMPTY), None)
    if rest is not None:
        raise ChatError(f"{where}: field {shown(rest)} is not supported; allowed are {', '.join(FIELDS)}", f"{where}.{rest}")
    role = message.get("role")
    if not isinstance(role, str) or len(role) > MAX_NAME:
        raise not_allowed(f"{where}.role", role, "a text such as 'user'")
    plain: dict[str, Any] = {"role": role}
    for name in ("name", "tool_call_id"):
        if (value := message.get(name)) is not None:
            plain[name] = _name(value, f"{where}.{name}")
    for name in ("reasoning_content", "reasoning", "tool_calls"):
        if message.get(name) not in EMPTY and role != "assistant":
            raise ChatError(f"{where}.{name}: got one of role {shown(role)}; allowed: of role 'assistant' only", f"{where}.{name}")
    for name in ("reasoning", "reasoning_content"):
        if (reasoning := message.get(name)) is not None:
            if not isinstance(reasoning, str):
                raise not_allowed(f"{where}.{name}", reasoning, "a text")
            plain["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls not in EMPTY:
        plain["tool_calls"] = _calls(calls, f"{where}.tool_calls", budget)
    content = message.get("content")
    may_lack = content is None and role == "assistant" and ("tool_calls" in plain or "reasoning_content" in plain)
    return {**plain, "content": "" if may_lack else text_of(content, f"{where}.content")}


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise not_allowed(where, value, f"a text of at most {MAX_NAME} characters")
    return value


def text_of(content: Any, where: str, types: Sequence[str] = ("text",), may_be_empty: bool = False) -> str:
    """A content as one text: it is one, or a list of parts of these types; raises ChatError for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not (content or may_be_empty):
        raise not_allowed(where, content, "a text, or a list of text parts")
    if len(content) > MAX_PARTS:
        raise ChatError(f"{where}: got {len(content):,} parts; allowed: at most {MAX_PARTS:,}", where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in types or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            allowed = ", ".join(map(repr, types))
            raise ChatError(f"{where}: a part is {shown(kind)}; allowed: parts of type {allowed}, with a text", where)
    return "".join(part["text"] for part in content)


def _calls(calls: Any, where: str, budget: list[int]) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise not_allowed(where, calls, "a list of calls")
    if len(calls) > MAX_CALLS:
        raise ChatError(f"{where}: got {len(calls):,} calls; allowed: at most {MAX_CALLS}", where)
    return [_call(call, f"{where}.{i}", budget) for i, call in enumerate(calls)]


def _call(call: Any, where: str, budget: list[int]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise not_allowed(where, call, '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}')
    name = _name(function.get("name"), f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments", budget)
    identified = {} if call.get("id") is None else {"id": _name(call["id"], f"{where}.id")}
    return {**identified, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(given: Any, where: str, budget: list[int]) -> Any:
    """Templates want a mapping, OpenAI's API sends its text."""
    if isinstance(given, Mapping) or given in (None, ""):
        return given or {}
    if isinstance(given, str):
        budget[0] -= sum(map(given.count, ",[{"))
        if budget[0] < 0:
            raise ChatError(f"{where}: all calls have more than {MAX_ARGUMENT_VALUES:,} values; leave old calls out", where)
        try:
            found = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ChatError(f"{where}: got {shown(given)}, no JSON ({error}); allowed: the text of a JSON object", where) from error
        if isinstance(found, dict):
            return found
    raise not_allowed(where, given, "a JSON object, or its text")
