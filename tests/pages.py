"""The pages of this project, as its tests read them: Python blocks, links, paths. Run with pages, it runs their blocks:

python tests/pages.py README.md docs/recipes.md    # a line of JSON: {page: [what failed ("" if nothing did), seconds]}
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^( *)(```+|~~~+)[ \t]*([^\n`]*)\n(.*?)^ *\2[ \t]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#+ +(.+?) *#* *$", re.MULTILINE)
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+/?")
BARE = re.compile(r"`([\w-]+\.py)`")
NAMES = r"((?:`(?![\w.]+\.py`)[\w.]+(?:\(\))?`(?:,? and |,? or |, )?)+)"
PAIRS = re.compile(rf"{NAMES}\s+(?:in|of|from)\s+`(?P<after>[\w./-]+\.py)`|`(?P<before>[\w./-]+\.py)`:\s+{NAMES}")
FILES = (".py", ".md", ".json", ".svg", ".toml", ".txt", ".yml", ".yaml", ".sh", ".safetensors")
NO_RUN = "no-run"


@dataclass(frozen=True)
class Block:
    """One ```python of a page; `line` is that of its first line of code."""

    words: tuple[str, ...]
    line: int
    code: str

    @property
    def runs(self) -> bool:
        return NO_RUN not in self.words

    def compiled(self, page: str) -> CodeType:
        """With the line numbers of the page, for tracebacks."""
        return compile("\n" * (self.line - 1) + self.code, page, "exec")


def all_pages() -> list[str]:
    """README.md, DESIGN.md and everything in docs, relative to the root."""
    return ["README.md", "DESIGN.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        indent, words, code = len(match[1]), match[3].split(), match[4]
        if words and words[0] in ("python", "py", "python3"):
            dedented = "".join(line[min(indent, len(line) - len(line.lstrip(" "))) :] for line in code.splitlines(keepends=True))
            found.append(Block(tuple(words), text.count("\n", 0, match.start(4)) + 1, dedented))
    return found


def links(text: str) -> list[str]:
    """Targets of links and pictures that are no URL, with their anchors."""
    prose = CODE.sub("", FENCE.sub("", text))
    return [target for target in LINK.findall(prose) if not re.match(r"[a-z][a-z+.-]*:", target)]


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings: lower case, without punctuation, spaces as hyphens, a number from the second of a name on."""
    seen: dict[str, int] = {}
    for title in HEADING.findall(FENCE.sub("", text)):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()).replace(" ", "-")
        seen[name] = seen.get(name, -1) + 1
    return {f"{name}-{n}" if n else name for name, count in seen.items() for n in range(count + 1)}


def paths(text: str) -> list[str]:
    """What looks like a path of this repository, in backticks or blocks: it has the ending of a file, or begins with a folder of ours."""
    code = [match[4] for match in FENCE.finditer(text)] + [match[2] for match in CODE.finditer(FENCE.sub("", text))]
    words = (word.strip(".,;:()[]{}\"'") for each in code for word in each.split())
    bare = (re.sub(r"(::.*|:\d+)$", "", word) for word in words)
    return [word for word in bare if PATH.fullmatch(word) and (word.endswith(FILES) or (ROOT / word.split("/")[0]).is_dir())]


def bare_files(text: str) -> list[str]:
    """Python files that are named in backticks without a folder."""
    return BARE.findall(FENCE.sub("", text))


def pairs(text: str) -> list[tuple[str, str]]:
    """(file, name) of every "`name` in `file.py`" and "`file.py`: `name`, `other`"; of a dotted name the last part."""
    found = []
    for match in PAIRS.finditer(re.sub(r"\s+", " ", FENCE.sub("", text))):
        names = re.findall(r"`[\w.]*?(\w+)(?:\(\))?`", match[1] or match[4])
        found += [(match["after"] or match["before"], name) for name in names]
    return found


def run(page: str) -> str:
    """Run the blocks of a page in one namespace; what failed, or an empty text."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks((ROOT / page).read_text(encoding="utf-8")):
        printed = io.StringIO()
        try:
            if block.runs:
                with contextlib.redirect_stdout(printed):
                    exec(block.compiled(page), names)
        except (Exception, SystemExit):  # noqa: BLE001 (the page's own)
            return f"{traceback.format_exc(limit=-8)}\nprinted: {printed.getvalue()[-500:]}"
    return ""


def main() -> None:
    done = {}
    for page in sys.argv[1:]:
        start = time.perf_counter()
        done[page] = [run(page), round(time.perf_counter() - start, 1)]
        gc.collect()
    print(json.dumps(done))


if __name__ == "__main__":
    main()
