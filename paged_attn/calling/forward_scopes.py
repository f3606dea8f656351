"""Where the code of a model finds the functions that it calls by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn


def forward_scopes(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The globals of the forwards of these modules and of those inside them, each once."""
    forwards = [inspect.unwrap(kind.forward) for kind in dict.fromkeys(type(part) for module in modules for part in module.modules())]
    return list({id(each.__globals__): each.__globals__ for each in forwards if inspect.isfunction(each)}.values())
