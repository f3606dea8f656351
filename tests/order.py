"""The longest files first, so that no worker is alone with one at the end: workers of xdist take whole files, and by themselves those with
most tests first, which says little about seconds.

seconds.txt has the mean seconds of a case of each function that takes long, as measured; a slow test that it does not have counts as just
slow, any other as little. `pytest --durations 0 --durations-min 0.05 -vv > LOG; python -m tests.order LOG` writes its lines for the
functions in the log.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.quick import LONG, function_and_case, measured, slow_tests

SECONDS = Path(__file__).with_name("seconds.txt")
UNKNOWN = 0.1  # seconds of a case that nobody has listed


def known_seconds() -> dict[str, float]:
    """Mean seconds of a case, by function."""
    lines = SECONDS.read_text(encoding="utf-8").splitlines()
    return {function: float(seconds) for seconds, function in (line.split(" ", 1) for line in lines)}


def longest_first(nodes: Iterable[str], seconds: dict[str, float]) -> dict[str, float]:
    """The files of these tests, those that take longest first, with their seconds."""
    taken: Counter[str] = Counter()
    for node in nodes:
        taken[node.partition("::")[0]] += seconds.get(function_and_case(node)[0], UNKNOWN)  # type: ignore[assignment]
    return dict(taken.most_common())


def sort_by_seconds(items: list[pytest.Item]) -> None:
    """Stable: tests of a file stay in its order."""
    seconds = {**dict.fromkeys(slow_tests(), LONG), **known_seconds()}
    places = {file: place for place, file in enumerate(longest_first((item.nodeid for item in items), seconds))}
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])


def updated(known: dict[str, float], log: str) -> dict[str, float]:
    """With what this log says of its functions, sorted; those that take little are left out."""
    found = dict(known)
    for function, cases in measured(log).items():
        found.pop(function, None)
        if sum(cases.values()) > LONG:
            found[function] = round(sum(cases.values()) / len(cases), 1)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    table = updated(known_seconds(), Path(sys.argv[1]).read_text(encoding="utf-8"))
    SECONDS.write_text("".join(f"{seconds} {function}\n" for function, seconds in table.items()), encoding="utf-8")
