"""Recurrent state that a module takes and returns, like an RNN cell: `output, state = module(x, state)`.

No model is known by name: what shows a cell is an argument of fixed size that comes back in the module's result with other numbers. Of a
tensor that several cells get and change, each keeps the column that it changed (`state[1][:, :, 3]` of a model that stacks its layers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.specs.recurrent import StateSpec
from paged_attn.calling.left_as_it_was import left_as_it_was
from paged_attn.recurrent.cache_state import CacheTemplate, Column, Path, leaves_of, name_of
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.watching.call_parts import LONG, SHORT, layer_of, refused
from paged_attn.recurrent.watching.watch import Call, is_cache, named_arguments


@dataclass
class _Cell:
    """One call of a module that was given state and returned it.

    Attributes:
        call: its `cache_name` is the parameter that received the state.
        fresh: a copy of the state as it was given.
        at: index of the state in the module's result.
        after: returned tensors whose values changed, by path.
        columns: for those of them of which only one column changed: that column.
        own: whether some of them were not returned by a submodule.
    """

    call: Call
    fresh: Any
    at: int
    after: dict[Path, Tensor]
    columns: dict[Path, Column]
    own: bool = True

    @property
    def key(self) -> tuple[str, str]:
        return self.call.name, self.call.cache_name

    @property
    def shapes(self) -> dict[Path, torch.Size]:
        return {path: value.shape for path, value in _tensors(self.fresh).items()}


def carried_layers(model: nn.Module, inputs_of: Callable[[int], dict[str, Any]]) -> list[RecurrentLayer]:
    """The innermost modules that change all of their state themselves, in execution order, not yet verified.

    Raises:
        UnsupportedError: one cannot be run by itself; the message names it and the reason.
    """
    short, long = (_cells(model, {**inputs_of(length), "use_cache": True}) for length in (SHORT, LONG))
    earlier = {cell.key: cell for cell in short}
    cells = [cell for cell in long if cell.own and cell.key in earlier and cell.shapes == earlier[cell.key].shapes]
    return [_layer(cell, earlier[cell.key], cells) for cell in cells]


def _cells(model: nn.Module, inputs: dict[str, Any]) -> list[_Cell]:
    watcher = _Watcher()
    with left_as_it_was(model), torch.no_grad():
        for name, module in model.named_modules():
            if name:
                watcher.hook(name, module)
        model(**inputs)
    return watcher.cells


class _Watcher:
    def __init__(self) -> None:
        self.cells: list[_Cell] = []
        self._open: list[tuple[nn.Module, dict[str, Any]]] = []
        self._left: list[tuple[Tensor, int]] = []  # states that cells returned, with their versions at that time

    def hook(self, name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = named_arguments(module, args, kwargs)
            self._open.append((module, {key: _copied(value) for key, value in arguments.items() if self._is_state(value)}))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            opened, given = self._open.pop()
            assert opened is module
            for key, fresh in given.items() if isinstance(output, tuple) else ():
                for at, part in enumerate(output):
                    if changed := _changed(fresh, part):
                        call = Call(name, module, named_arguments(module, args, kwargs), key, output)
                        self._add(call, fresh, at, changed)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)

    def _add(self, call: Call, fresh: Any, at: int, after: dict[Path, Tensor]) -> None:
        own = any(all(value is not left or value._version != version for left, version in self._left) for value in after.values())
        before = _tensors(fresh)
        columns = {path: column for path, value in after.items() if (column := _column(before[path], value))}
        self.cells.append(_Cell(call, fresh, at, after, columns, own))
        self._left += [(value, value._version) for value in after.values()]

    def _is_state(self, value: Any) -> bool:
        """Whether it holds tensors, all [1, ...]. Comparing two calls shows later whether their size is fixed."""
        tensors = [] if is_cache(value) else _tensors(value).values()
        return bool(tensors) and all(each.shape[:1] == (1,) for each in tensors)


def _tensors(root: Any) -> dict[Path, Tensor]:
    return {path: value for path, value in leaves_of(root).items() if isinstance(value, Tensor)}


def _copied(root: Any) -> Any:
    tensors = _tensors(root)
    return CacheTemplate(root, root, tensors, list(tensors)).make([value.clone() for value in tensors.values()])


def _changed(fresh: Any, part: Any) -> dict[Path, Tensor]:
    """The returned tensors whose values changed; empty if `part` does not have the structure of `fresh`."""
    before, now = _tensors(fresh), _tensors(part)
    if before.keys() != now.keys() or any(value.shape != before[path].shape for path, value in now.items()):
        return {}
    return {path: now[path] for path in sorted(now, key=str) if not now[path].equal(before[path])}


def _column(before: Tensor, after: Tensor) -> Column | None:
    """(dimension, index) if the tensors differ only there, else None."""
    differs = before != after
    for dim in range(differs.dim() - 1, 0, -1):
        indices = differs.transpose(0, dim).flatten(1).any(1).nonzero().flatten().tolist() if differs.shape[dim] > 1 else []
        if len(indices) == 1:
            return dim, indices[0]
    return None


def _layer(cell: _Cell, earlier: _Cell, cells: list[_Cell]) -> RecurrentLayer:
    call, where, fresh = cell.call, cell.call.name, _tensors(cell.fresh)
    if cell.after.keys() != earlier.after.keys():
        raise refused(where, f"it changes other parts of its {call.cache_name} in a call of {SHORT} tokens than in one of {LONG}")
    columns = {}
    for path, value in cell.after.items():
        if any(value is other for each in cells if each is not cell for other in each.after.values()):
            if path not in cell.columns or cell.columns[path] != earlier.columns.get(path):
                raise refused(where, f"it changes all of {call.cache_name}{name_of(path)}, which other layers change, too")
            columns[path] = cell.columns[path]
    for each in (call, earlier.call):
        each.arguments = {**each.arguments, call.cache_name: None}
    call.output = tuple(None if at == cell.at else part for at, part in enumerate(call.output))
    template = CacheTemplate(cell.fresh, cell.fresh, cell.after, list(cell.after), columns)
    states = [
        StateSpec(f"{call.cache_name}{name_of(path)}{_column_words(columns.get(path))}", tuple(value.shape[1:]), fresh[path].dtype)
        for path, value in zip(cell.after, template.read(cell.fresh), strict=True)
    ]
    return layer_of(call, earlier.call, states, template, state_at=cell.at)


def _column_words(column: Column | None) -> str:
    """`[:, :, i]` with the letter i, so that equal layers have equal names."""
    return "" if column is None else f"[{', '.join([':'] * column[0] + ['i'])}]"
