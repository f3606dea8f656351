"""Calls of Llama 4 and others as Python: the whole answer is `[get_weather(city="Paris"), get_time()]`."""

from __future__ import annotations

import ast

from paged_attn.chat.formats.tool_format import Call, Taken, ToolFormat

START, END = "<|python_start|>", "<|python_end|>"
MAX_LENGTH, MAX_DEPTH = 64 << 10, 50  # characters of all calls, and nesting of brackets


class PythonicFormat(ToolFormat):
    name = "pythonic"
    marks = (START, END)
    openings = ("[", START)
    at_beginning = True
    endings = "]>"

    def take(self, text: str, ended: bool) -> Taken | None:
        start = len(START) if text.startswith(START) else 0
        end = _end_of_list(text, start)
        if end is None:
            return Taken((), len(text)) if ended else None
        calls = self._calls(text[start:end].strip()) if end <= MAX_LENGTH else []
        if start and not ended and END.startswith(text[end : end + len(END)]) and len(text) - end < len(END):
            return None
        return Taken(calls, end + len(END) if start and text.startswith(END, end) else end)

    def _calls(self, text: str) -> list[Call]:
        """[] for what is not a list of calls of known tools with literals by name."""
        try:
            tree = ast.parse(text, mode="eval").body
            listed = [_call(node) for node in tree.elts] if isinstance(tree, ast.List) else []
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return []
        return [call for call in listed if call is not None] if all(call and self.knows(call.name) for call in listed) else []


def _call(node: ast.expr) -> Call | None:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return None
    return Call.of(ast.unparse(node.func), {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords})


def _end_of_list(text: str, start: int) -> int | None:
    """Behind the bracket that closes the first one; `len(text)` if brackets lie too deep; None if it has not come."""
    depth, quote, i = 0, "", start
    while i < len(text):
        character = text[i]
        if quote:
            if character == "\\":
                i += 1
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in "[({":
            depth += 1
            if depth > MAX_DEPTH:
                return len(text)
        elif character in "])}":
            depth -= 1
            if depth <= 0:
                return i + 1
        i += 1
    return None
