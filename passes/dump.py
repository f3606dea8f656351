"""`PAGED_ATTN_DUMP=folder`: the graph before and after each pass, with how many nodes of each kind there are."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path

from torch import fx

_numbers = itertools.count()


def dump_folder() -> Path | None:
    return Path(folder) if (folder := os.environ.get("PAGED_ATTN_DUMP")) else None


class Dump:
    """Numbered files of one graph in `PROCESS-NUMBER-MODEL/`: `00-traced.txt`, `01-specialise_numbers.txt`, ...; none unless requested."""

    def __init__(self, name: str) -> None:
        self._files = itertools.count()
        self.folder = dump_folder()
        if self.folder is not None:
            self.folder /= f"{os.getpid()}-{next(_numbers)}-{name}"
            self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, graph: fx.Graph, after: str, said: str = "") -> None:
        if self.folder is None:
            return
        counts = Counter(node._pretty_print_target(node.target) if node.op == "call_function" else node.op for node in graph.nodes)
        lines = [
            f"# after {after}" + (f": {said}" if said else ""),
            f"# {len(graph.nodes)} nodes",
            *(f"# {count:6,} {target}" for target, count in counts.most_common()),
            "",
            *(node.format_node() or "" for node in graph.nodes),
        ]
        self.folder.joinpath(f"{next(self._files):02}-{after}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
