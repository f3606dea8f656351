"""What a value that a model wrote as plain text is, by the schema of its tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paged_attn.chat.tools import Tool

MAX_DEPTH = 8  # of schemas inside schemas
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}


def argument_value(text: str, tool: Tool | None, key: str) -> Any:
    """The argument `key`: its text where the schema allows one or says nothing, else the JSON that it is; its text if it is none.

    A nullable text that is `null` (or Python's `None`) is null.
    """
    properties = None if tool is None else tool.parameters.get("properties")
    types = _types(properties.get(key), tool.parameters) if tool is not None and isinstance(properties, Mapping) else set[str]()
    if "null" in types and text.strip() in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    try:
        return json.loads(text.lower() if "boolean" in types and text.strip() in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """JSON types that a schema names, itself or in its parts; none if it says nothing."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    kind = schema.get("type")
    found = {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
    if schema.get("nullable") is True:
        found.add("null")
    values = schema.get("enum") if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if not found:
        found = {_TYPES[type(value)] for value in values or () if type(value) in _TYPES}
    for part in ("anyOf", "oneOf", "allOf"):
        for each in schema[part] if isinstance(schema.get(part), list) else ():
            found |= _types(each, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        found |= _types(target, root, depth + 1)
    return found
