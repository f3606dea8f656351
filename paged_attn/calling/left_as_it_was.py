"""Calls a model and restores whatever its forward changed in it, or a forward that we replaced meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from paged_attn.attn_ops.replaced_entries import replaced_entries


@dataclass
class Changes:
    """What calls of a model put into it, known when the block is over.

    Attributes:
        attributes: tensors that modules keep as plain attributes and that were replaced, by path.
        modules: submodules that were replaced, by path: as they were and as they came.
    """

    attributes: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, tuple[nn.Module, nn.Module]] = field(default_factory=dict)


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[Changes]:
    """Inside, the model may be called; afterwards every attribute, buffer, submodule and hook is the one that it had.

    What was written into its tensors in place stays. Where that is a parameter (RWKV divides some by powers of two in the first call that
    evaluates), so do the numbers and flags that modules keep: one of them says that it is done.
    """
    changes = Changes()
    before = [(name, module, dict(vars(module)), _tables(module)) for name, module in model.named_modules()]
    versions = _versions(model)
    try:
        yield changes
    finally:
        prepared = _versions(model) != versions
        for name, module, attributes, tables in reversed(before):
            _set_tables_back(name, tables, changes)
            if prepared:
                attributes = {key: value for key, value in attributes.items() if key in vars(module) or not _is_note(value)}
                attributes |= {key: value for key, value in vars(module).items() if _is_note(value)}
            _set_attributes_back(name, module, attributes, changes)


def _versions(model: nn.Module) -> list[int]:
    return [0 if parameter.is_inference() else parameter._version for parameter in model.parameters()]


def _is_note(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _tables(module: nn.Module) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Parameters, buffers, submodules and hooks, each with a copy: a module changes these tables in place, and may put something else in
    the place of one of its own."""
    return {key: (value, dict(value)) for key, value in vars(module).items() if isinstance(value, dict) and key.startswith("_")}


def _set_tables_back(name: str, tables: dict[str, tuple[dict[str, Any], dict[str, Any]]], changes: Changes) -> None:
    for key, (table, entries) in tables.items():
        if _same(table, entries):
            continue
        for child, was in entries.items() if key == "_modules" else ():
            if isinstance(was, nn.Module) and isinstance(now := table.get(child), nn.Module) and now is not was:
                changes.modules[f"{name}.{child}".lstrip(".")] = was, now
        table.clear()
        table.update(entries)


def _same(table: dict[str, Any], entries: dict[str, Any]) -> bool:
    return list(table) == list(entries) and all(table[key] is value for key, value in entries.items())


def _set_attributes_back(name: str, module: nn.Module, before: dict[str, Any], changes: Changes) -> None:
    now = vars(module)
    for key in [key for key, value in now.items() if key not in before or value is not before[key]]:
        if isinstance(now[key], Tensor):
            changes.attributes[f"{name}.{key}"] = now[key]
        if key in before:
            now[key] = before[key]
        else:
            del now[key]
    now |= {key: value for key, value in before.items() if key not in now}


def replaced_forward(module: object, forward: Callable[..., Any]) -> AbstractContextManager[None]:
    """Inside, `module` computes `forward`; afterwards its own instance attribute is back, if it had one, and else its class's method."""
    return replaced_entries(vars(module), {"forward": forward})
