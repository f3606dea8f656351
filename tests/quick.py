"""Which tests `make test` runs: all that take little, and of those that take long the case that takes least.

slow.txt lists functions by what was measured, with the case that stays, if one is quick. What is new counts as quick until somebody
measures again: `pytest --durations 0 --durations-min 0.05 -vv > LOG; python -m tests.quick LOG`.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

SLOW = Path(__file__).with_name("slow.txt")
LONG = 1.5  # seconds that all cases of a quick function take together, on one core
LONGEST_KEPT = 1.0  # seconds of the one case that stays of a slow function
_LINE = re.compile(r"^\s*([\d.]+)s (setup|call|teardown)\s+(tests/\S+?\.py::.+?)\s*$")


def function_and_case(node: str) -> tuple[str, str]:
    """`tests/a.py::test_b`, `case` of tests/a.py::test_b[case]; no case is ""."""
    function, _, case = node.partition("[")
    return function, case.removesuffix("]")


def slow_tests(path: Path = SLOW) -> dict[str, str | None]:
    """Functions that take long, and the case of each that is quick; None if there is none."""
    found: dict[str, str | None] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        function, _, kept = line.partition(" keep ")
        found[function] = kept or None
    return found


def measured(log: str) -> dict[str, dict[str, float]]:
    """Seconds by function and case, without what prepares them (a fixture of a module is paid by its first test)."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in log.splitlines():
        if (match := _LINE.match(line)) and match[2] != "setup":
            function, case = function_and_case(match[3])
            seconds[function][case] += float(match[1])
    return seconds


def lines_of(seconds: dict[str, dict[str, float]]) -> list[str]:
    lines = []
    for function, cases in sorted(seconds.items()):
        if sum(cases.values()) <= LONG:
            continue
        case = min(cases, key=lambda name: cases[name])
        lines.append(function + (f" keep {case}" if case and cases[case] <= LONGEST_KEPT else ""))
    return lines


if __name__ == "__main__":
    SLOW.write_text("\n".join(lines_of(measured(Path(sys.argv[1]).read_text(encoding="utf-8")))) + "\n", encoding="utf-8")
