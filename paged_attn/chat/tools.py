"""Tools that a model may call, and whether it must."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paged_attn.chat.errors import ChatError, not_allowed
from paged_attn.shown import shown

MAX_TOOLS = 128  # OpenAI's limit
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
CHOICES = ("none", "auto", "required")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """A function. `parameters`: the JSON schema of its arguments; `given`: all that templates may show of it."""

    name: str
    parameters: dict[str, Any]
    given: dict[str, Any]


@dataclass(frozen=True)
class ToolChoice:
    """mode: one of `CHOICES`. name: the one tool that must be called, if any; then mode is "required"."""

    mode: str
    name: str | None = None

    def allowed(self, tools: Sequence[Tool]) -> list[Tool]:
        return [tool for tool in tools if self.name in (None, tool.name)]


def checked_tools(tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None) -> list[Tool]:
    """Tools as OpenAI's API has them, `{"type": "function", "function": {"name", "description", "parameters"}}`, or Python functions with
    types and a docstring, which transformers describes. Raises ChatError: anything else, two of one name, or too many."""
    if tools is None:
        return []
    if not isinstance(tools, (list, tuple)):
        raise not_allowed("tools", tools, "a list of tools")
    if len(tools) > MAX_TOOLS:
        raise ChatError(f"tools: got {len(tools):,} tools; allowed: at most {MAX_TOOLS}", "tools")
    checked = [_tool(tool, f"tools.{i}") for i, tool in enumerate(tools)]
    names = [tool.name for tool in checked]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ChatError(f"tools: two of them are called {twice!r}; give each a name of its own", "tools")
    return checked


def _tool(given: Any, where: str) -> Tool:
    if callable(given) and not isinstance(given, Mapping):
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

        try:
            given = get_json_schema(given)
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ChatError(f"{where}: the function cannot be described: {error}; or give its JSON schema", where) from error
    function = given.get("function") if isinstance(given, Mapping) and given.get("type", "function") == "function" else None
    if not isinstance(function, Mapping):
        raise not_allowed(where, given, '{"type": "function", "function": {...}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise not_allowed(f"{where}.function.name", name, "letters, digits, _, - and ., at most 128 of them")
    if not isinstance(parameters, Mapping | None):
        raise not_allowed(f"{where}.function.parameters", parameters, "a JSON schema, which is a mapping")
    return Tool(name, dict(parameters) if parameters else NO_PARAMETERS, dict(given))


def allowed_tools(choice: Any, tools: Sequence[Tool]) -> tuple[list[Tool], Any]:
    """The tools that the model hears of, and the choice among them: of `{"type": "allowed_tools", ...}`, with its fields in a field of that
    name or beside it, those that it names and its mode. Raises ChatError: it names none, or one that there is not."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return list(tools), choice
    fields = choice.get("allowed_tools", choice)
    mode, listed = (fields.get("mode"), fields.get("tools")) if isinstance(fields, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        allowed = '{"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}, ...]}'
        raise ChatError(f"tool_choice.allowed_tools: got {shown(fields)}; allowed: {allowed}", "tool_choice")
    names = [_name_of(each) for each in listed]
    known = [tool.name for tool in tools]
    if unknown := [name for name in names if name not in known]:
        raise _no_tool(unknown[0], tools)
    return [tool for tool in tools if tool.name in names], mode


def _name_of(listed: Any) -> Any:
    function = listed.get("function", listed) if isinstance(listed, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def checked_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """`None` is "auto" where there are tools. Raises ChatError: no choice of OpenAI's API, a name that no tool has, or a call that is
    required although there are no tools."""
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(choice, str) and choice in CHOICES:
        if choice == "required" and not tools:
            raise ChatError("tool_choice: 'required' without tools; give tools", "tool_choice")
        return ToolChoice(choice if tools else "none")
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type", "function") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        allowed = ", ".join(CHOICES) + ', {"type": "function", "function": {"name": ...}}, {"type": "allowed_tools", ...}'
        raise not_allowed("tool_choice", choice, allowed)
    if all(tool.name != name for tool in tools):
        raise _no_tool(name, tools)
    return ToolChoice("required", name)


def _no_tool(name: Any, tools: Sequence[Tool]) -> ChatError:
    known = ", ".join(tool.name for tool in tools[:10]) or "none"
    return ChatError(f"tool_choice: no tool is called {shown(name)}; tools given: {known}", "tool_choice")
