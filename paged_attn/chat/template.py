"""The tokenizer's chat template: from messages to the text of a prompt."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paged_attn.chat.errors import ChatError
from paged_attn.chat.messages import with_texts
from paged_attn.chat.tools import Tool

_READS_TOOLS = re.compile(r"\btools\b")


def template_text(tokenizer: Any, chat_template: str | None, has_tools: bool) -> str:
    """The template that such a chat is rendered with; a name chooses among several that a tokenizer has. Raises ChatError: there is none;
    says what to do."""
    lacks = ""
    if tokenizer is None:
        lacks, hint = "tokenizer", "give LLM(model, tokenizer=...), or token ids to generate (/v1/completions)"
    elif chat_template is None and getattr(tokenizer, "chat_template", None) is None:
        lacks, hint = "chat template", "give one (chat_template=, --chat-template), or whole prompts to generate (/v1/completions)"
    if lacks:
        raise ChatError(f"this model has no {lacks}, so that it cannot chat; {hint}", "messages", "no_chat_template")
    try:
        text: str = tokenizer.get_chat_template(chat_template, [{}] if has_tools else None)
    except ValueError as error:
        raise ChatError(f"chat_template: {error}", "chat_template") from error
    return text


def reads_tools(template: str) -> bool:
    return _READS_TOOLS.search(template) is not None


def rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: str,
    tools: Sequence[Tool],
    settings: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """The text of the prompt. It holds all special tokens that it needs.

    Args:
        messages: plain ones.
        settings: variables for the template.

    Raises:
        ChatError: the template refuses the messages, with its own words; Jinja cannot read it; a setting has the name of an argument.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    taken = set(inspect.signature(tokenizer.apply_chat_template).parameters) & set(settings)
    if taken:
        raise ChatError(f"chat_template_kwargs may not hold {', '.join(sorted(taken))}", "chat_template_kwargs")
    render = partial(
        tokenizer.apply_chat_template, tools=[tool.given for tool in tools] or None, chat_template=template, tokenize=False,
        add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message, **settings,
    )  # fmt: skip
    try:
        try:
            text: str = render(list(messages))
        except TypeError:  # DeepSeek's join the arguments of a call to texts, where most want a mapping
            text = render([with_texts(message) for message in messages])
    except TemplateSyntaxError as error:
        what = f"Jinja cannot read the model's chat template: {error.message} in line {error.lineno}"
        raise ChatError(f"{what}; give another (chat_template=, --chat-template)", "chat_template") from error
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ChatError(f"the model's chat template refuses the messages: {error}", "messages") from error
    return text


def read_template(given: str) -> str:
    """A template from a file, or written out. Raises ValueError: neither, or Jinja cannot read it."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    text = given
    if "{{" not in given and "{%" not in given:
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            what = "give a file, or a Jinja template, which has {{ or {%"
            raise ValueError(f"--chat-template {given!r} cannot be read: {error}; {what}") from error
    try:
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"--chat-template: Jinja cannot read it: {error.message} in line {error.lineno}") from error
    return text
