"""How large a schema, expression or grammar may be, counted before anybody reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_DEFINITIONS = 1000  # of a JSON schema, those in schemas inside it included
MAX_RULES = 1000  # of a grammar, terminals included
_RULE = re.compile(r"^[ \t]*[?!]?\w+(?:\.[+-]?\d+)?(?:\{[^}\n]*\}|\[[^]\n]*\])?[ \t]*:", re.MULTILINE)


def check_size(what: str, source: str) -> None:
    """Raises ValueError: too many definitions or rules. `SamplingParams` has counted the bytes."""
    if what == "json_schema" and (count := sum(_definitions(json.loads(source)))) > MAX_DEFINITIONS:
        raise ValueError(f"json_schema: got {count} definitions; allowed: at most {MAX_DEFINITIONS}; leave out what no answer needs")
    if what == "grammar" and (count := len(_RULE.findall(source))) > MAX_RULES:
        raise ValueError(f"grammar: got {count} rules; allowed: at most {MAX_RULES}; write several as one")


def _definitions(schema: Any) -> Iterator[int]:
    """How many each place has where definitions stand."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield from (len(held) for name in ("$defs", "definitions") if isinstance(held := value.get(name), dict))
            left += value.values()
        elif isinstance(value, list):
            left += value
