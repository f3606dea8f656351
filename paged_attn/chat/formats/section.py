"""Formats whose calls are in one section, each between its own marks, with arguments in JSON."""

from __future__ import annotations

from typing import ClassVar

from paged_attn.chat.formats.tool_format import MAX_CALLS_ENFORCED, Call, Mark, Taken, ToolFormat, as_text, space_end


class SectionFormat(ToolFormat):
    """Attributes:
    section, each: the opening and the closing mark of all calls, and of each.
    between_calls: stands between two calls that are enforced, as a grammar writes it.
    """

    section: ClassVar[tuple[str, str]]
    each: ClassVar[tuple[str, str]]
    between_calls: ClassVar[str] = ""
    endings = ""

    def take(self, text: str, ended: bool) -> Taken | None:
        """All calls one after another, to the end of their section. The section's marks may be missing, and the last one's end where the
        answer ends."""
        opening, closing = self.section
        calls: list[Call | None] = []
        end = len(opening) if text.startswith(opening) else 0
        while True:
            at = space_end(text, end)
            if text.startswith(closing, at):
                end = at + len(closing)
                break
            if not text.startswith(self.each[0], at):
                if not ended and any(mark.startswith(text[at : at + len(mark)]) for mark in (closing, self.each[0])):
                    return None
                break
            stop = text.find(self.each[1], at)
            if stop < 0 and not ended:
                return None
            calls.append(self.call(text[at + len(self.each[0]) : stop if stop >= 0 else len(text)]))
            end = stop + len(self.each[1]) if stop >= 0 else len(text)
        return Taken([call for call in calls if call is not None] if None not in calls else (), end)

    def call(self, text: str) -> Call | None:
        """What stands between the marks of one call; None if that is none."""
        raise NotImplementedError

    def grammar(self, several: bool, mark: Mark) -> list[str]:
        between = f'"{self.between_calls}" ' * bool(self.between_calls)
        more = f" ({between}call){{0,{MAX_CALLS_ENFORCED - 1}}}" * several
        calls = [f"call{i}: {mark(self.each[0])} {self.enforced(i, mark)} {mark(self.each[1])}" for i in range(len(self.tools))]
        one = f"call: {' | '.join(f'call{i}' for i in range(len(calls)))}"
        return [f"calls: {mark(self.section[0])} call{more} {mark(self.section[1])}", one, *calls]

    def enforced(self, index: int, mark: Mark) -> str:
        """What a grammar has between the marks of a call of this tool."""
        raise NotImplementedError


def arguments_of(name: str, text: str, id: str = "") -> Call | None:
    arguments = as_text(text.strip())
    return None if arguments is None else Call(name, arguments, id)
