"""Shared by the lists of our own backends of an op: look one up by name, and say why it does not fit or was not selected."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from paged_attn.backends.needs import Needs
from paged_attn.backends.selection.packages import unmet_requirements


class _Fits(Protocol):
    needs: ClassVar[Needs]

    def unmet(self, problem: Any) -> list[str]: ...


B = TypeVar("B", bound=_Fits)
P = TypeVar("P")


class OurBackends(Generic[B, P]):
    """The backends of an op: name -> "module:Class" in `targets`; `setting` selects one. One instance serves all layers."""

    def __init__(self, setting: str, targets: Mapping[str, str]) -> None:
        self._setting, self._targets, self._made = setting, targets, dict[str, B]()

    def __call__(self, name: str) -> B:
        """The backend of that name; imports its module.

        Raises:
            ValueError: an unknown name; the message has the setting and the known names.
        """
        if name not in self._targets:
            raise ValueError(f"unknown {self._setting} {name!r}; known are 'auto', {', '.join(map(repr, self._targets))}")
        if name not in self._made:
            self._made[name] = pkgutil.resolve_name(self._targets[name])()
        return self._made[name]

    def reasons_against(self, name: str, problem: P) -> list[str]:
        """Every reason against a backend, including missing packages; empty if it fits."""
        backend = self(name)
        return [*backend.unmet(problem), *unmet_requirements(backend.needs.requirements)]


def rejected_suffix(rejected: Mapping[str, str]) -> str:
    """` (not taken: grouped_mm: ranked after triton)`, or ""."""
    others = "; ".join(f"{name}: {why}" for name, why in rejected.items())
    return f" (not taken: {others})" if others else ""
