"""What a transformers cache holds, as paths and values; and caches made from the states of a pool.

No class of caches is known by name: a cache is an object with attributes, lists and dicts. What a module changes in it between an
empty cache and one that has seen tokens is found by comparing the two, and a cache for any step is a copy along those paths alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# ("attribute", name), ("item", index or key) or, at the end, ("length", None) of a list or dict.
Step = tuple[str, Any]
Path = tuple[Step, ...]
Tree = dict[Step, Any]
Snapshot = dict[Path, tuple[Any, int]]
Column = tuple[int, int]  # one slice of a tensor: (dimension, index)
_LENGTH: Step = ("length", None)
_LEAVES = frozenset((type(None), bool, int, float, str, Tensor, nn.Parameter))  # most of what a cache holds; told at once


def leaves_of(root: Any) -> dict[Path, Any]:
    """Every value that is not a container, and every container's length, by path."""
    found: dict[Path, Any] = {}
    pending: list[tuple[Path, Any]] = [((), root)]
    seen: set[int] = set()
    while pending:
        path, value = pending.pop()
        children = children_of(value)
        if children is None:
            found[path] = value
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, (list, dict)):
                found[(*path, _LENGTH)] = len(value)
            pending += [((*path, step), child) for step, child in children]
    return found


def children_of(value: Any) -> list[tuple[Step, Any]] | None:
    """What a container holds, or None if the value is a leaf: tensors, numbers, functions, classes, modules."""
    if type(value) in _LEAVES:
        return None
    if isinstance(value, dict):
        return [(("item", key), child) for key, child in value.items()]
    if isinstance(value, (list, tuple)):
        return [(("item", index), child) for index, child in enumerate(value)]
    if isinstance(value, (Tensor, nn.Module, type)) or callable(value) or not hasattr(value, "__dict__"):
        return None
    return [(("attribute", name), child) for name, child in vars(value).items()]


def snapshot(root: Any) -> Snapshot:
    """Leaves with their versions: comparing two snapshots shows what was replaced or written in place."""
    return {path: (value, value._version if isinstance(value, Tensor) else 0) for path, value in leaves_of(root).items()}


def changed_paths(before: Snapshot, after: Snapshot) -> set[Path]:
    """Paths that are new, or whose value or version changed."""
    return {path for path, (now, version) in after.items() if path not in before or _differs(*before[path], now, version)}


def _differs(before: Any, version: int, now: Any, version_now: int) -> bool:
    if before is now:
        return version != version_now
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return True
    return type(before) is not type(now) or bool(before != now)


def value_at(root: Any, path: Path) -> Any:
    for kind, key in path:
        root = getattr(root, key) if kind == "attribute" else root[key]
    return root


def name_of(path: Path) -> str:
    """`layers[3].conv_states[0]`."""
    words = [f".{key}" if kind == "attribute" else "" if kind == "length" else f"[{key!r}]" for kind, key in path]
    return "".join(words).lstrip(".")


class CacheTemplate:
    """Makes the cache that a module is called with, and reads the states that the module leaves in it.

    Args:
        fresh: a cache that has seen nothing.
        present: a cache that has seen tokens.
        changed: the paths in which the module made them differ.
        states: those of them that hold the module's state tensors [batch, ...].
        columns: path -> (dimension, index) of the module's part, for tensors of which it owns only that part, also in an empty cache.
    """

    def __init__(
        self, fresh: Any, present: Any, changed: Iterable[Path], states: Sequence[Path], columns: Mapping[Path, Column] | None = None
    ) -> None:
        self.fresh, self.present = fresh, present
        self.state_paths, self._columns = tuple(states), dict(columns or {})
        leaves = leaves_of(fresh)
        self._start: dict[Path, Tensor] = {path: leaves[path] for path in states if isinstance(leaves.get(path), Tensor)}
        self._tree: Tree = {}
        for path in changed:
            branch = self._tree
            for step in path:
                branch = branch.setdefault(step, {})

    def make(self, states: Sequence[Tensor] | None) -> Any:
        """A new cache: an empty one for None, else one that holds `states` [batch, ...] in the order of `state_paths`."""
        if states is None:
            return _copy_along(self.fresh, self._tree, (), {path: value.clone() for path, value in self._start.items()})
        kept = {path: self._full_tensor(path, state) for path, state in zip(self.state_paths, states, strict=True)}
        return _copy_along(self.present, self._tree, (), kept)

    @property
    def empty(self) -> list[Tensor | None]:
        """The states [1, ...] of an empty cache; None for what it does not hold yet."""
        found = [self._start.get(path) for path in self.state_paths]
        columns = [self._columns.get(path) for path in self.state_paths]
        return [state if state is None or at is None else state.select(*at) for state, at in zip(found, columns, strict=True)]

    def _full_tensor(self, path: Path, state: Tensor) -> Tensor:
        """The model's tensor, of which the state may be only a column."""
        if path not in self._columns:
            return state
        (dim, index), start = self._columns[path], self._start[path]
        full = start.expand(len(state), *start.shape[1:])
        parts = full.narrow(dim, 0, index), state.unsqueeze(dim), full.narrow(dim, index + 1, full.shape[dim] - index - 1)
        return torch.cat(parts, dim)  # a copy; vmap supports it

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that every made cache shares with `fresh` and `present`."""
        return [value for root in (self.fresh, self.present) for value in leaves_of(root).values() if isinstance(value, Tensor)]

    def read(self, cache: Any) -> list[Tensor]:
        """The states in a cache that the module was called with, or returned."""
        states = []
        for path in self.state_paths:
            value = value_at(cache, path)
            assert isinstance(value, torch.Tensor), f"{name_of(path)} holds a {type(value).__name__} after a call"
            states.append(value.select(*self._columns[path]) if path in self._columns else value)
        return states


def _copy_along(value: Any, tree: Tree, path: Path, states: dict[Path, Tensor]) -> Any:
    """A copy of the containers along the tree, with states inserted; everything else is shared."""
    if path in states:
        return states[path]
    children = children_of(value)
    if not tree or children is None:
        return value
    have = dict(children)
    parts = {key: _copy_along(have[key], branch, (*path, key), states) for key, branch in tree.items() if key in have}
    if isinstance(value, (dict, list)):
        copied = value.copy()
        for (_, key), part in parts.items():
            copied[key] = part
        return copied
    if isinstance(value, tuple):
        return tuple(parts.get(("item", index), child) for index, child in enumerate(value))
    made = object.__new__(type(value))
    made.__dict__.update(vars(value))
    made.__dict__.update({key: part for (_, key), part in parts.items()})
    return made
