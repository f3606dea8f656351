"""State in plain attributes of modules, kept for each request as if it lay in a cache.

Before a call the attributes are set to a request's states, afterwards its new ones are read off them, and then the module is as it was.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class KeptAttributes:
    """In place of a cache: `values` of a module's attributes and of those inside it, by path below it."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


def call_with_attributes(module: nn.Module, arguments: dict[str, Any], kept: KeptAttributes) -> Any:
    """What a module returns that starts from these states; `kept` then has those after the call."""
    owners = {path: (module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in kept.values}
    before = {path: getattr(owner, name) for path, (owner, name) in owners.items()}
    try:
        for path, (owner, name) in owners.items():
            setattr(owner, name, kept.values[path])
        result = module(**arguments)
        kept.values = {path: getattr(owner, name) for path, (owner, name) in owners.items()}
        return result
    finally:
        for path, (owner, name) in owners.items():
            setattr(owner, name, before[path])
