"""Messages and calls of gpt-oss, OpenAI's harmony format. A call is
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.

Source: OpenAI, "OpenAI harmony response format" (cookbook, 2025).
"""

from __future__ import annotations

from paged_attn.chat.formats.tool_format import Mark, Taken, ToolFormat

HARMONY = "harmony"
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDINGS = ("<|end|>", "<|call|>", "<|return|>")
FUNCTIONS = "functions."  # prefix of the names of the caller's tools
FINAL = f"{CHANNEL}final{MESSAGE}"


def is_harmony(template: str) -> bool:
    return all(mark in template for mark in (START, CHANNEL, MESSAGE))


class HarmonyFormat(ToolFormat):
    """Answers are read by `ChannelReader`, since thoughts and contents are messages, too."""

    name = HARMONY
    marks = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDINGS)
    openings = (CHANNEL,)
    endings = ">"

    def take(self, text: str, ended: bool) -> Taken | None:
        raise NotImplementedError("the messages of an answer are read by ChannelReader")

    def grammar(self, several: bool, mark: Mark) -> list[str]:
        """A thought, if there is any, and one call: the model ends its turn with it."""
        end = mark(ENDINGS[0])
        thought = f"thought: /(?s:.*)/ {end}" if end.startswith("<") else f"thought[suffix={end}]: /(?s:.*)/"
        before = f'before: {mark(CHANNEL)} "analysis" {mark(MESSAGE)} thought {mark(START)} "assistant"'
        calls = [
            f'call{i}: {mark(CHANNEL)} "commentary to={FUNCTIONS}{tool.name} " {mark(CONSTRAIN)} "json" {mark(MESSAGE)} arguments{i}'
            for i, tool in enumerate(self.tools)
        ]
        return [f"calls: before? ({' | '.join(f'call{i}' for i in range(len(calls)))})", before, thought, *calls]

    def answer(self, mark: Mark) -> str:
        """What stands before an answer that is not a call."""
        return f'{mark(CHANNEL)} "final" {mark(MESSAGE)} '
