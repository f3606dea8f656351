"""Numbers in a module's code that may be a number of tokens from which on it computes something else (`max(1, log(T) / log(512))`).

A module that runs unchanged has no graph in which they would show.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

MOST = 8  # numbers of a module
CROWD, LATEST = 257, 2304  # tokens that exceed most capacities; numbers that are looked for in code
STEP = 256  # lengths at which models are trained are multiples of it, and bases of frequencies are not
_DEPTH, _FEW = 3, 64  # objects within objects; entries of a dict or list, and elements of a tensor, that are read
# Numbers of other things than tokens, under the names that configs have for them; also where no weight of the module has that size.
_NO_LENGTHS = {"vocab_size", "hidden_size", "intermediate_size", "in_features", "out_features", "padding_idx", "rope_theta"}
_OF_NO_MODEL = {"torch", "transformers", "paged_attn", *sys.stdlib_module_names}  # nor has an installed package numbers of a model
_OF_ANY_MODULE = set(vars(nn.Module()))


def crowd_of(module: nn.Module) -> int:
    """So many tokens for one expert that they exceed every capacity of it that is a number in a module's code, up to LATEST."""
    return CROWD + max(numbers_in_code(module, CROWD, LATEST), default=0)


def numbers_in_code(module: nn.Module, least: int, most: int) -> list[int]:
    """The whole numbers between these two, both included, in the code of a module and of those inside it, and in what it names: plain
    attributes, those of their configs and classes, globals, defaults, closures, and small tensors and objects among these. Sizes of weights
    and token ids are left out; at most MOST, the smallest ones."""
    return sorted(number for number in _whole_numbers(module) if least <= number <= most)[:MOST]


def first_unproved_length(module: nn.Module) -> int | None:
    """The smallest such number beyond LATEST that looks like a length: on so many tokens a module that runs unchanged is not tried."""
    return min((number for number in _whole_numbers(module) if number > LATEST and number % STEP == 0), default=None)


def _whole_numbers(module: nn.Module) -> set[int]:
    sizes = {size for tensor in (*module.parameters(), *module.buffers()) for size in tensor.shape}
    found = set[float]()
    for part in module.modules():
        reached, named = _Reached(), -1
        while named < len(reached.names):  # a function among its attributes may name others
            named = len(reached.names)
            reached.seen.clear()
            for function in (*_functions(type(part)), *(each for each in vars(part).values() if isinstance(each, types.FunctionType))):
                reached.add(function, 0)
            reached.add_attributes(part, 0)
            reached.add_attributes(getattr(part, "config", None), 0)
            reached.read_functions()
        found |= reached.numbers
    return {int(number) for number in found if number == int(number)} - sizes


class _Reached:
    """The numbers that some functions hold or name."""

    def __init__(self) -> None:
        self.numbers, self.names = set[float](), set[str]()
        self.seen = set[int]()
        self._unread = list[types.FunctionType]()  # read one after the other: functions name functions name functions

    def read_functions(self) -> None:
        """Reads the functions that were added, and those that they name."""
        while self._unread:
            self._read(self._unread.pop())

    def _read(self, function: types.FunctionType) -> None:
        """Its constants, and what it and the functions inside it name."""
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.add(value, 0)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents, 0)
            except ValueError:  # not filled in yet
                continue
        pending = [function.__code__]
        while pending:
            code = pending.pop()
            pending += [each for each in code.co_consts if isinstance(each, types.CodeType)]
            self.names.update(code.co_names)
            self.add(code.co_consts, 0)
            for name in code.co_names:
                self._add_global(function, function.__globals__.get(name))

    def _add_global(self, function: types.FunctionType, value: Any) -> None:
        """Functions of packages hold numbers of their own; those of this file, and of the model's other files, are read."""
        if isinstance(value, types.ModuleType):
            if _is_a_models(value.__name__) and id(value) not in self.seen:
                self.seen.add(id(value))
                for name in self.names & vars(value).keys():
                    self._add_global(function, vars(value)[name])
        elif isinstance(value, (types.FunctionType, type)):
            if value.__module__ == function.__module__ or _is_a_models(value.__module__):
                self.add(value, 0)
        else:
            self.add(value, 0)

    def add(self, value: Any, depth: int) -> None:
        """A value that code names: a number, or what holds some."""
        if _is_number(value):
            self.numbers.add(value)
        elif type(value) in (Tensor, nn.Parameter):
            if 0 < value.numel() <= _FEW and not value.is_meta and not value.is_complex():
                self.numbers.update(float(number) for number in value.detach().flatten().tolist() if abs(number) < 1e9)
        elif isinstance(value, (dict, list, tuple, set, frozenset)):
            held = [each for name, each in value.items() if not _is_no_length(name)] if isinstance(value, dict) else list(value)
            for each in held[:_FEW] if depth < _DEPTH else ():
                self.add(each, depth + 1)
        elif isinstance(value, types.FunctionType):
            if id(value) not in self.seen:
                self.seen.add(id(value))
                self._unread.append(value)
        elif isinstance(value, types.MethodType):
            self.add(value.__func__, depth)
            self.add(value.__self__, depth + 1)
        elif isinstance(value, type):
            self._add_class(value, depth)
        elif depth < _DEPTH and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, types.ModuleType)):
            self._add_class(type(value), depth)
            self.add_attributes(value, depth)

    def _add_class(self, kind: type, depth: int) -> None:
        if id(kind) in self.seen or not _is_a_models(kind.__module__):
            return
        self.seen.add(id(kind))
        for function in _functions(kind):
            self.add(function, depth)
        self._add_named(vars(kind), depth)

    def add_attributes(self, holder: Any, depth: int) -> None:
        """Those of an object and of its classes that code names."""
        if id(holder) in self.seen:
            return
        self.seen.add(id(holder))
        for base in type(holder).__mro__ if isinstance(holder, nn.Module) else ():
            if not base.__module__.startswith("torch."):
                self._add_named({name: value for name, value in vars(base).items() if _is_number(value)}, depth)
        own = dict(getattr(holder, "__dict__", {}))
        if isinstance(holder, nn.Module):
            own = {name: value for name, value in own.items() if name not in _OF_ANY_MODULE}
            own.update((*holder.named_parameters(recurse=False), *holder.named_buffers(recurse=False)))
        self._add_named(own, depth)

    def _add_named(self, values: Any, depth: int) -> None:
        for name, value in list(values.items()):
            if name in self.names and not _is_no_length(name):
                self.add(value, depth + 1)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9  # type: ignore[arg-type]


def _is_no_length(name: object) -> bool:
    return isinstance(name, str) and (name in _NO_LENGTHS or name.endswith("_token_id"))


@functools.cache
def _is_a_models(module: str | None) -> bool:
    """Whether a file may be a model's: not one of ours, of Python's library, or of an installed package."""
    package = (module or "").split(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package not in _OF_NO_MODEL and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _functions(kind: type) -> Iterator[types.FunctionType]:
    """The methods of a class and of its bases, without those of torch."""
    for base in kind.__mro__:
        if base is not object and not base.__module__.startswith("torch."):
            for each in vars(base).values():
                inner = each.fget if isinstance(each, property) else getattr(each, "__func__", each)  # of a class or static method
                if isinstance(inner, types.FunctionType):
                    yield inner
