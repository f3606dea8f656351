"""Which tool-call format a template uses, and which one is enforced."""

from __future__ import annotations

from collections.abc import Sequence

from paged_attn.chat.errors import not_allowed
from paged_attn.chat.formats.harmony import HARMONY
from paged_attn.chat.formats.json_calls import HermesFormat, JsonFormat, LlamaFormat
from paged_attn.chat.formats.mistral import MistralFormat, NamedMistralFormat
from paged_attn.chat.formats.pythonic import PythonicFormat
from paged_attn.chat.formats.section import DeepSeekFormat, FencedDeepSeekFormat, KimiFormat
from paged_attn.chat.formats.tagged import GlmFormat, MiniMaxFormat, QwenCoderFormat, SeedFormat, TaggedFormat
from paged_attn.chat.formats.tool_format import ToolFormat
from paged_attn.chat.tools import Tool

FORMATS: dict[str, type[ToolFormat]] = {
    kind.name: kind
    for kind in (
        HermesFormat, QwenCoderFormat, SeedFormat, GlmFormat, LlamaFormat, MistralFormat, NamedMistralFormat, PythonicFormat, JsonFormat,
        DeepSeekFormat, FencedDeepSeekFormat, KimiFormat, MiniMaxFormat,
    )
}  # fmt: skip
TOOL_PARSERS = ("auto", "none", *FORMATS, HARMONY)
# What only templates of a format say, or two texts that they all have; the first that fits counts. None: a format that is none of ours,
# and shares a mark with one.
SIGNS: tuple[tuple[str | tuple[str, str], type[ToolFormat] | None], ...] = (
    ("<|channel|>", None),
    (("<｜tool▁sep｜>", "```json"), FencedDeepSeekFormat), ("<｜tool▁sep｜>", DeepSeekFormat),
    ("<|tool_calls_section_begin|>", KimiFormat),
    ("<minimax:tool_call>", MiniMaxFormat), ("<seed:tool_call>", SeedFormat), ("<arg_key>", GlmFormat), ("<parameter=", QwenCoderFormat),
    ("<function=", None), ("<tool_calls>", None), ("<tool_call>", HermesFormat),
    ("[ARGS]", NamedMistralFormat), ("[TOOL_CALLS]", MistralFormat),
    ("<|python_start|>", PythonicFormat), ("[func_name1(", PythonicFormat),
    ("<|python_tag|>", LlamaFormat), ('"parameters": dictionary', LlamaFormat),
)  # fmt: skip
ENFORCED_AS_JSON = (TaggedFormat, PythonicFormat)


def format_of(template: str, parser: str, tools: Sequence[Tool]) -> ToolFormat | None:
    """The format that a setting names, or that a template shows; None if it shows none. Raises ChatError: a name that is none of
    `TOOL_PARSERS`."""
    if parser not in TOOL_PARSERS:
        raise not_allowed("tool_parser", parser, ", ".join(TOOL_PARSERS))
    if parser == "auto":
        kind = next((kind for sign, kind in SIGNS if all(text in template for text in ([sign] if isinstance(sign, str) else sign))), None)
    else:
        kind = FORMATS.get(parser)
    return None if kind is None else kind(tools)


def enforced_format(found: ToolFormat | None, tools: Sequence[Tool]) -> ToolFormat:
    """The format of calls that a grammar enforces: the model's own, or plain JSON."""
    if found is None or isinstance(found, ENFORCED_AS_JSON):
        return JsonFormat(tools)
    return type(found)(tools)
