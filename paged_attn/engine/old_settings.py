"""Settings under the names that they had in the last release; they work for one more, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

NEW_NAMES = {"early_rows": "early_logits_gather", "one_row_linears": "gemv", "early_launches": "pdl"}
NEW_VALUES = {("graphs", "pieces"): "piecewise"}
GONE = {"rope_and_store": "it gained a percent at most and cost two for batches of 128"}


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings by their names and values of today.

    Raises:
        ValueError: a setting under both names, or one that is gone and was switched on.
    """
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name in GONE:
            if value:
                raise ValueError(f"{name}={value!r}: this setting is gone, {GONE[name]}; leave it out")
            _warn(f"the setting {name} is gone, {GONE[name]}")
            continue
        new = NEW_NAMES.get(name, name)
        if new != name:
            if new in given:
                raise ValueError(f"{name} is the old name of {new}, and both are given; leave {name} out")
            _warn(f"the setting {name} is called {new} now; the old name goes with the next release")
        if isinstance(value, str) and (new, value) in NEW_VALUES:
            _warn(f"{new}={value!r} is called {NEW_VALUES[new, value]!r} now; the old word goes with the next release")
            value = NEW_VALUES[new, value]
        settings[new] = value
    return settings


def _warn(text: str) -> None:
    warnings.warn(text, DeprecationWarning, stacklevel=4)
