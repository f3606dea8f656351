"""Numbers in a module's code that may be a number of tokens from which on it computes something else (`max(1, log(T) / log(512))`).

A module that runs unchanged has no graph in which they would show.
"""

from __future__ import annotations

import types
from collections.abc import Iterator

from torch import nn

MOST = 8  # numbers of a module
CROWD, LATEST = 257, 2304  # tokens that exceed most capacities; numbers that are looked for in code


def crowd_of(module: nn.Module) -> int:
    """So many tokens for one expert that they exceed every capacity of it that is a number in a module's code, up to LATEST."""
    return CROWD + max(numbers_in_code(module, CROWD, LATEST), default=0)


def numbers_in_code(module: nn.Module, least: int, most: int) -> list[int]:
    """The whole numbers between these two, both included, in the code of a module and of those inside it, and in their plain attributes and
    those of their configs that the code names. Sizes of weights are left out; at most MOST, the smallest ones."""
    sizes = {size for tensor in (*module.parameters(), *module.buffers()) for size in tensor.shape}
    found = set[float]()
    for part in module.modules():
        functions = [*_functions(type(part)), *(each for each in vars(part).values() if isinstance(each, types.FunctionType))]
        codes = [code for function in functions for code in _codes(function, set())]
        names = {name for code in codes for name in code.co_names}
        found.update(number for code in codes for number in code.co_consts if _is_number(number))
        for holder in (part, getattr(part, "config", None)):
            found.update(number for name, number in getattr(holder, "__dict__", {}).items() if name in names and _is_number(number))
    whole = {int(number) for number in found if number == int(number) and least <= number <= most}
    return sorted(whole - sizes)[:MOST]


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9  # type: ignore[arg-type]


def _functions(kind: type) -> Iterator[types.FunctionType]:
    """The methods of a class and of its bases, without those of torch."""
    for base in kind.__mro__:
        if base is not object and not base.__module__.startswith("torch."):
            yield from (each for each in vars(base).values() if isinstance(each, types.FunctionType))


def _codes(function: types.FunctionType, seen: set[types.FunctionType]) -> Iterator[types.CodeType]:
    """The code of a function, of those inside it, and of those of its own Python module that it names."""
    seen.add(function)
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        yield code
        pending += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in code.co_names:
            other = function.__globals__.get(name)
            if isinstance(other, types.FunctionType) and other.__module__ == function.__module__ and other not in seen:
                yield from _codes(other, seen)
