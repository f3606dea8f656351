"""Tools of /v1/responses: functions, and namespaces of functions, which reach the model as functions of longer names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_attn.server.http.errors import not_allowed

# What OpenAI's server runs by itself. Codex offers these with every request, and works without them.
NOT_SHOWN = ("web_search", "web_search_preview", "image_generation")
SEPARATOR = "__"


def shown_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Without those that only OpenAI's server can run: what the model is shown, and what the answer names."""
    return [tool for tool in tools or () if tool.get("type") not in NOT_SHOWN]


def chat_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Shown tools in the form that chats have. Raises ApiError: 400 for one that the client does not run itself; with its place."""
    found: list[dict[str, Any]] = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type") in NOT_SHOWN:
            continue
        if tool.get("type") == "namespace":
            members = _members(tool, f"tools.{i}")
            found += [_function(member, f"tools.{i}.tools.{j}", tool["name"]) for j, member in enumerate(members)]
        else:
            found.append(_function(tool, f"tools.{i}", None))
    return found


def whole_name(namespace: str | None, name: Any) -> Any:
    """What the model calls a function."""
    return f"{namespace}{SEPARATOR}{name}" if namespace is not None and isinstance(name, str) else name


def names_in_namespaces(tools: Sequence[dict[str, Any]] | None) -> dict[str, dict[str, str]]:
    """The name and the namespace of each function of a namespace, by what the model calls it; of tools that `chat_tools` has checked."""
    return {
        whole_name(tool["name"], member["name"]): {"name": member["name"], "namespace": tool["name"]}
        for tool in tools or ()
        if tool.get("type") == "namespace"
        for member in tool["tools"]
    }


def _members(tool: dict[str, Any], where: str) -> list[Any]:
    name, members = tool.get("name"), tool.get("tools")
    if not isinstance(name, str):
        raise not_allowed(f"{where}.name", name, "a text")
    if not isinstance(members, list):
        raise not_allowed(f"{where}.tools", members, "a list of functions")
    return members


def _function(tool: Any, where: str, namespace: str | None) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if kind != "function":
        allowed = "'function', which the client runs itself" + ("" if namespace is not None else ", and 'namespace', which holds functions")
        raise not_allowed(f"{where}.type", kind, allowed)
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    if namespace is not None:
        function["name"] = whole_name(namespace, function.get("name"))
    return {"type": "function", "function": function}
