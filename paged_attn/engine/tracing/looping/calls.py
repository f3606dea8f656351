"""How a model calls its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paged_attn.engine.tracing.module_calls import LENGTHS, watch_calls

_PLAIN = (bool, int, float, str)


class NotProved(Exception):
    """Something about a block of experts that is not known, in words that follow its name."""


class OtherCall(NotProved):
    """It is not known how a block is called."""


@dataclass(frozen=True)
class CallForm:
    """How a module is called: the names of its tensors in order (None for positional ones), and what else it is given, by name."""

    names: tuple[str | None, ...]
    constants: tuple[tuple[str, Any], ...]

    def call(self, module: nn.Module, given: Sequence[Tensor]) -> Any:
        """The module, of these tensors."""
        positional = [value for name, value in zip(self.names, given, strict=True) if name is None]
        named = {name: value for name, value in zip(self.names, given, strict=True) if name is not None}
        return module(*positional, **named, **dict(self.constants))

    def tensors_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor] | None:
        """The tensors of a call of this form; None if it has another."""
        if len(args) != self.names.count(None) or {*kwargs} != {name for name in (*self.names, *dict(self.constants)) if name is not None}:
            return None
        return [*args, *(kwargs[name] for name in self.names if name is not None)]


@dataclass(frozen=True)
class GivenTensor:
    """A tensor of a call: `shape` with 0 for the number of tokens, which is the size of `axis`."""

    shape: tuple[int, ...]
    axis: int
    dtype: torch.dtype

    def sizes(self, tokens: int) -> tuple[int, ...]:
        return *self.shape[: self.axis], tokens, *self.shape[self.axis + 1 :]


@dataclass(frozen=True)
class BlockCall(CallForm):
    """How a block is called, on any number of tokens."""

    tensors: tuple[GivenTensor, ...]


def calls_of(model: nn.Module, blocks: Sequence[nn.Module], inputs: Callable[[int], dict[str, Any]]) -> dict[nn.Module, BlockCall | str]:
    """How each block is called, from runs of the model on two lengths; or why it is not known. `inputs`: those of so many tokens."""
    forms: dict[nn.Module, list[_Form | str]] = {block: [] for block in blocks}

    def seen(_length: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        try:
            forms[module].append(_form(args, kwargs))
        except NotProved as error:
            forms[module].append(str(error))

    watch_calls(model, forms, inputs, seen)
    return {block: _in_general(found) for block, found in forms.items()}


class _Form(NamedTuple):
    names: tuple[str | None, ...]
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    constants: tuple[tuple[str, Any], ...]


def _form(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Form:
    tensors = [*((None, value) for value in args), *((name, value) for name, value in kwargs.items() if isinstance(value, Tensor))]
    constants = tuple((name, value) for name, value in kwargs.items() if not isinstance(value, Tensor))
    other = [value for _, value in tensors if not isinstance(value, Tensor)]
    other += [value for _, value in constants if value is not None and not isinstance(value, _PLAIN)]
    if other or not tensors:
        kinds = ", ".join(type(value).__name__ for value in other) or "no tensor"
        raise NotProved(f"it is given {kinds}; known are tensors and plain values")
    shapes = tuple((tuple(value.shape), value.dtype) for _, value in tensors)
    return _Form(tuple(name for name, _ in tensors), shapes, constants)


def _in_general(forms: Sequence[_Form | str]) -> BlockCall | str:
    if reasons := [form for form in forms if isinstance(form, str)]:
        return reasons[0]
    told = [form for form in forms if isinstance(form, _Form)]
    if len(told) != len(LENGTHS):
        return f"it is called {len(told)} times in {len(LENGTHS)} calls of the model"
    one, two = told
    if (one.names, one.constants) != (two.names, two.constants):
        return "it is called in several ways"
    tensors = []
    for (shape, dtype), (longer, _) in zip(one.tensors, two.tensors, strict=True):
        axes = [axis for axis, sizes in enumerate(zip(shape, longer, strict=False)) if sizes == LENGTHS]
        rest = [(sizes[:axis] + sizes[axis + 1 :]) for axis in axes[:1] for sizes in (shape, longer)]
        if len(axes) != 1 or rest[0] != rest[1] or any(size != 1 for size in shape[: axes[0]]):
            return (
                f"it is given a tensor {list(shape)} for {LENGTHS[0]} tokens and {list(longer)} for {LENGTHS[1]}; known is one row a token"
            )
        tensors.append(GivenTensor((*shape[: axes[0]], 0, *shape[axes[0] + 1 :]), axes[0], dtype))
    return BlockCall(one.names, one.constants, tuple(tensors))
