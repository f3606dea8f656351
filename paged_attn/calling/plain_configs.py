"""Configs whose attributes are looked up without Python code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from paged_attn.calling.hf_configs import attention_configs


@contextmanager
def plain_configs(model: nn.Module) -> Iterator[None]:
    """Inside, reading an attribute of the model's configs runs no Python code; afterwards they have their own classes again.

    transformers' configs translate names in `__getattribute__`, and Dynamo traces that at every read. Hybrid models read a property that
    loops over all layers once per layer: nearly half of the time that Bamba's 32 layers took to trace.
    """
    configs = [(config, type(config)) for config in attention_configs(model)]
    try:
        for config, kind in configs:
            if vars(config).get("_heterogeneity_spec") is None:  # such a config refuses some reads
                config.__class__ = _plain_class(kind, config.attribute_map)
        yield
    finally:
        for config, kind in configs:
            config.__class__ = kind


def _plain_class(kind: type[Any], attribute_map: dict[str, str]) -> type[Any]:
    """A subclass with a property for each name that stands for another."""
    aliases = {alias: _alias_of(name) for alias, name in attribute_map.items()}
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__", "__init__")}
    return type(kind.__name__, (kind,), {**aliases, **same, "__getattribute__": object.__getattribute__})


def _alias_of(name: str) -> property:
    def read(config: Any) -> Any:
        return getattr(config, name)

    return property(read)
