"""Configs whose attributes are looked up without Python code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from paged_attn.calling.hf_configs import attention_configs

_KEPT = ("__module__", "__qualname__", "__doc__", "__init__", "__eq__", "__hash__")  # or it would be a dataclass with its own

_lock = threading.Lock()
_inside: dict[int, tuple[type[Any], int]] = {}  # by id of a config: its own class, and in how many blocks it is


@contextmanager
def plain_configs(model: nn.Module) -> Iterator[None]:
    """Inside, reading an attribute of the model's configs runs no Python code; afterwards they have their own classes again.

    transformers' configs translate names in `__getattribute__`, and Dynamo traces that at every read. Hybrid models read a property that
    loops over all layers once per layer: nearly half of the time that Bamba's 32 layers took to trace. Left alone are configs that look
    names up in a way of their own, or let no other class be made of theirs.
    """
    configs = [config for config in attention_configs(model) if _only_translates(config)]
    entered = []
    try:
        for config in configs:
            if _enter(config):
                entered.append(config)
        yield
    finally:
        for config in entered:
            _leave(config)


def _only_translates(config: Any) -> bool:
    from transformers import PretrainedConfig

    kinds: tuple[Any, ...] = PretrainedConfig, object
    usual = any(type(config).__getattribute__ is kind.__getattribute__ for kind in kinds)
    return isinstance(config, PretrainedConfig) and usual and vars(config).get("_heterogeneity_spec") is None  # it refuses some reads


def _enter(config: Any) -> bool:
    with _lock:  # models in several threads may share a config
        kind, count = _inside.get(id(config), (type(config), 0))
        if not count:
            try:
                object.__setattr__(config, "__class__", _plain_class(kind, config.attribute_map))
            except TypeError:
                return False
        _inside[id(config)] = kind, count + 1
        return True


def _leave(config: Any) -> None:
    with _lock:
        kind, count = _inside.pop(id(config))
        if count > 1:
            _inside[id(config)] = kind, count - 1
        else:
            object.__setattr__(config, "__class__", kind)


def _plain_class(kind: type[Any], attribute_map: dict[str, str]) -> type[Any]:
    """A subclass with a property for each name that stands for another."""
    aliases = {alias: _alias_of(name) for alias, name in attribute_map.items()}
    same = {name: getattr(kind, name) for name in _KEPT}
    return type(kind.__name__, (kind,), {**aliases, **same, "__getattribute__": object.__getattribute__})


def _alias_of(name: str) -> property:
    def read(config: Any) -> Any:
        return getattr(config, name)

    return property(read)
