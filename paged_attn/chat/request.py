"""Turns messages, tools and settings of one chat into a prompt and the form of its answers, with a grammar if calls are enforced."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paged_attn.chat.answers.answer_form import AnswerForm
from paged_attn.chat.answers.reasoning import ThinkTags, begins_inside, grammar_of, tags_of
from paged_attn.chat.errors import ChatError
from paged_attn.chat.formats.choose import FORMATS, enforced_format, format_of
from paged_attn.chat.formats.harmony import FINAL, HARMONY, START, HarmonyFormat, is_harmony
from paged_attn.chat.formats.tool_format import ToolFormat
from paged_attn.chat.marks import kept_ids, own_token
from paged_attn.chat.messages import plain_messages
from paged_attn.chat.template import reads_tools, rendered, template_text
from paged_attn.chat.tools import Tool, ToolChoice, allowed_tools, checked_choice, checked_tools
from paged_attn.engine.requests.detokenizer import special_ids
from paged_attn.engine.sampling.structured.compile_process import JSON_DEFAULTS
from paged_attn.shown import shown

_PLAIN = {"type", "properties", "required", "description", "title", "$defs", "definitions"}
CALL_OPTIONS: Any = {"whitespace_pattern": "[ \\n]?"}  # models write calls on one line


@dataclass(frozen=True)
class ChatPrompt:
    """text: holds all special tokens that the prompt needs; form: of the answers to it."""

    text: str
    form: AnswerForm


@dataclass(frozen=True)
class ChatRequest:
    """A conversation, and how it goes on.

    Attributes:
        messages: see `plain_messages`.
        tools: see `checked_tools`.
        tool_choice: "none" shows the model no tools, "auto" lets it call them, "required" makes it call at least one, and
            {"type": "function", "function": {"name": ...}} makes it call that one. None: "auto" where there are tools.
        parallel_tool_calls: whether one answer may hold several calls.
        chat_template: instead of the tokenizer's: a Jinja template, or the name of one of several that it has.
        chat_template_kwargs: variables for the template.
        add_generation_prompt: end the prompt with the beginning of an answer.
        continue_final_message: go on with the last message instead; then no generation prompt is added.
        tool_parser: a name of `TOOL_PARSERS`: "auto" is the tokenizer's response template, or what the chat template shows.
        reasoning_parser: a name of `REASONING_PARSERS`, likewise.
        reasoning_effort: OpenAI's, such as "low"; a variable for templates that read it.
    """

    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    reasoning_effort: str | None = None

    def prompt(self, tokenizer: Any, guide: tuple[str, str] | None = None) -> ChatPrompt:
        """Render it.

        Args:
            tokenizer: of the model, for this call alone while it lasts.
            guide: what the params say that the answer follows: ("json_schema", "regex" or "grammar", its text).

        Raises:
            ChatError: messages, tools or settings that cannot be served; says which, and what is allowed.
        """
        tools = checked_tools(self.tools)
        tools, wanted = allowed_tools(self.tool_choice, tools)
        choice = checked_choice(wanted, tools)
        if choice.mode == "required" and guide is not None and guide[0] == "json_schema":
            guide = None  # a schema is of the text, of which such an answer has none
        if choice.mode == "none":
            tools = []
        template = template_text(tokenizer, self.chat_template, bool(tools))
        if tools and choice.mode == "auto" and not reads_tools(template):
            what = "the model's chat template has no place for tools, so that it would never hear of them"
            hint = "give another (chat_template=, --chat-template), or tool_choice='required' or 'none'"
            raise ChatError(f"tools: {what}; {hint}", "tools", "no_tools_in_template")
        messages = plain_messages(self.messages, template)
        if "reasoning_content" not in template and ".thinking" in template:  # gpt-oss's name of it, which it reads beside calls alone
            for message in messages:
                if not message["content"] and "reasoning_content" in message:
                    message["thinking"] = message.pop("reasoning_content")
        text = rendered(
            tokenizer, messages, template, tools, self._settings(template),
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
        )  # fmt: skip
        if guide is not None and not tools and self._reads_channels(tokenizer, template) and text.endswith(f"{START}assistant"):
            text += FINAL
        continued = str(messages[-1]["content"]) if self.continue_final_message else None
        return ChatPrompt(text, self._form(tokenizer, template, text, choice, tools, guide, continued))

    def _settings(self, template: str) -> Mapping[str, Any]:
        variables = self.chat_template_kwargs or {}
        if self.reasoning_effort is None:
            return variables
        if "reasoning_effort" not in template:
            what = f"got {shown(self.reasoning_effort)}, and the model's chat template does not read it; leave it out"
            raise ChatError(f"reasoning_effort: {what}", "reasoning_effort", "unsupported_value")
        return {"reasoning_effort": self.reasoning_effort, **variables}

    def _form(
        self,
        tokenizer: Any,
        template: str,
        text: str,
        choice: ToolChoice,
        tools: list[Tool],
        guide: tuple[str, str] | None,
        continued: str | None,
    ) -> AnswerForm:
        if choice.mode == "required" and guide is not None:
            raise ChatError(f"tool_choice: got one that asks for a call beside {guide[0]}; give one of them", "tool_choice")
        most = None if self.parallel_tool_calls else 1
        if self._reads_channels(tokenizer, template):
            return self._of_channels(tokenizer, text, choice, tools, guide, most)
        tags = tags_of(template, self.reasoning_parser)
        inside = tags is not None and guide is None and begins_inside(tags, text, continued)
        by_template = getattr(tokenizer, "response_template", None) is not None
        found = format_of(template, self.tool_parser, tools) if tools else None
        if tools and found is None and not by_template and choice.mode == "auto" and self.tool_parser == "auto":
            what = "the chat template does not show in which format the model calls tools"
            known = ", ".join((*FORMATS, HARMONY))
            hint = f"say which (tool_parser=, --tool-parser): {known}; 'none' reads no calls; or give tool_choice='required'"
            raise ChatError(f"tools: {what}; {hint}", "tools", "unknown_tool_format")
        if choice.mode == "required":
            format = enforced_format(None if by_template and self.tool_parser == "auto" else found, choice.allowed(tools))
            grammar = calls_grammar(tokenizer, format, self.parallel_tool_calls and choice.name is None, tags, inside)
            kept = kept_ids(tokenizer, (*(tags or ()), *format.marks))
            return AnswerForm(grammar, kept, tags, inside, format, most)
        # It reads an answer on from the prompt, which may end in a thought; a schema's answer holds none, and may be calls instead.
        of_schema = guide is not None and (guide[0] == "json_schema" or not tools)
        if by_template and not of_schema and self.reasoning_parser == "auto" and (self.tool_parser == "auto" or not tools):
            return AnswerForm(kept=special_ids(tokenizer), most_calls=most, template_of=tokenizer, prompt=text, tools=tools)
        maybe, found = self._calls_or_json(tokenizer, found, tools, guide)
        kept = kept_ids(tokenizer, (*(tags or ()), *(() if found is None else found.marks)))
        return AnswerForm(maybe, kept, tags, inside, found, most)

    def _reads_channels(self, tokenizer: Any, template: str) -> bool:
        """By gpt-oss's channels, where the setting says so, or the template alone says how answers look."""
        if self.tool_parser == HARMONY:
            return True
        is_plain = getattr(tokenizer, "response_template", None) is None and self.reasoning_parser == "auto"
        return is_plain and self.tool_parser in ("auto", "none") and is_harmony(template)

    def _of_channels(
        self, tokenizer: Any, text: str, choice: ToolChoice, tools: list[Tool], guide: tuple[str, str] | None, most: int | None
    ) -> AnswerForm:
        grammar, is_forced = None, choice.mode == "required"
        format = HarmonyFormat(choice.allowed(tools) if is_forced else tools)
        if is_forced or (tools and guide is not None and guide[0] == "json_schema"):
            grammar = calls_grammar(tokenizer, format, False, None, False, schema=None if guide is None else guide[1])
        shown = () if self.tool_parser == "none" and not is_forced else tools
        return AnswerForm(grammar, kept_ids(tokenizer, format.marks), most_calls=most, channels=True, prompt=text, tools=shown)

    def _calls_or_json(
        self, tokenizer: Any, found: ToolFormat | None, tools: list[Tool], guide: tuple[str, str] | None
    ) -> tuple[str | None, ToolFormat | None]:
        """Where an answer of a schema is asked for and tools may be called it is either; other guides say themselves what may come."""
        if not tools or guide is None or guide[0] != "json_schema":
            return None, found
        format = enforced_format(found, tools)
        return calls_grammar(tokenizer, format, self.parallel_tool_calls, None, False, schema=guide[1]), format


def calls_grammar(
    tokenizer: Any, format: ToolFormat, several: bool, tags: ThinkTags | None, inside: bool, schema: str | None = None
) -> str:
    """In llguidance's dialect of Lark: reasoning, if there is any, and then calls.

    Args:
        format: how calls are written, of the tools that may be called.
        several: whether there may be more than one.
        inside: the answer begins with reasoning.
        schema: of JSON that the answer may be instead of calls; None: it is calls.
    """

    def mark(text: str) -> str:
        """What a grammar calls a text: a token, if it is one of its own."""
        id = own_token(tokenizer, text)
        return json.dumps(text, ensure_ascii=False) if id is None else f"<[{id}]>"

    before, rules = grammar_of(tags, inside, mark)
    start = f"start: {before}calls" if schema is None else f"start: {before}(calls | answer)"
    rules += format.grammar(several, mark)
    rules += [f"arguments{i}: %json {_schema_text(_closed(tool.parameters), CALL_OPTIONS)}" for i, tool in enumerate(format.tools)]
    if schema is not None:
        head = format.answer(mark) if isinstance(format, HarmonyFormat) else ""
        rules += [f"answer: {head}json", f"json: %json {_schema_text(json.loads(schema), JSON_DEFAULTS)}"]
    return "\n".join([start, *rules, ""])


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, also where the schema leaves that out; it has what it lists, unless the schema says otherwise."""
    object_only = {**parameters, "type": "object"}
    return {**object_only, "additionalProperties": False} if parameters.keys() <= _PLAIN else object_only


def _schema_text(schema: dict[str, Any], options: Any) -> str:
    """On one line, with our options unless it brings its own."""
    return json.dumps({"x-guidance": options, **schema})
