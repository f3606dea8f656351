"""What the lists of our own backends of an op have in common: an object by its name, and the words for those that were not taken."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any


def made_by_name(setting: str, targets: Mapping[str, str], name: str) -> Any:
    """An object of the class "module:Class" that stands in `targets` under a name; its module is imported now.

    Raises:
        ValueError: an unknown name; the message has the setting and the known ones.
    """
    if name not in targets:
        raise ValueError(f"unknown {setting} {name!r}; known are 'auto', {', '.join(map(repr, targets))}")
    return pkgutil.resolve_name(targets[name])()


def not_taken(rejected: Mapping[str, str]) -> str:
    """` (not taken: grouped_mm: ranked after triton)`, or an empty text."""
    others = "; ".join(f"{name}: {why}" for name, why in rejected.items())
    return f" (not taken: {others})" if others else ""
