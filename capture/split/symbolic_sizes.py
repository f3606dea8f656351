"""The symbolic sizes in a piece's inputs, numbered so that code compiled for one graph's symbols can be reused for another's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.utils._sympy.symbol import SymT, symbol_is_type


class Sizes:
    """The symbols of some inputs in order of appearance.

    Args:
        inputs: fake tensors and symbolic sizes; anything else is ignored.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        found: dict[sympy.Symbol, Any] = {}
        for number in _numbers(inputs):
            for symbol in sorted(number.node.expr.free_symbols, key=str):
                found.setdefault(symbol, number.node.shape_env)
        self.symbols = tuple(found)
        self.environment: Any = next(iter(found.values()), None)  # a ShapeEnv, whose methods torch leaves untyped
        self._names = {symbol: sympy.Symbol(f"d{index}", integer=True) for index, symbol in enumerate(self.symbols)}

    def text(self, number: Any) -> str:
        """A size, stride or offset as text, with numbered symbols: `4*d0`."""
        return str(number.node.expr.xreplace(self._names)) if isinstance(number, SymInt | SymFloat | SymBool) else repr(number)

    @property
    def known(self) -> bool:
        """Whether every symbol is a backed size; guards are not known for data-dependent sizes and floats."""
        return all(symbol_is_type(symbol, SymT.SIZE) for symbol in self.symbols)

    def ranges(self) -> list[str]:
        """The known range of each symbol, on which Inductor relies without a guard."""
        return [str(self.environment.var_to_range.get(symbol)) for symbol in self.symbols]

    def seen(self) -> list[int]:
        """The sizes of the symbols in the trace, which decide what the compiler guards on."""
        return [number.node.hint if isinstance(number, SymInt) else number for number in self._as_numbers()]

    def guards(self) -> str | None:
        """All guards so far on these symbols, as an expression for `holds`; None if that expression would be incomplete.

        It is incomplete if a symbol was replaced by an expression of symbols that are not among these.
        """
        if self.environment is None:
            return ""
        numbers = self._as_numbers()
        lines = [self.environment.produce_guards_expression(numbers, guards=self.environment.get_pruned_guards(numbers)) or "True"]
        # A symbol that was replaced by an expression is no longer a symbol, so its guard is missing there.
        sources = {symbol: sympy.Symbol(f"L['t{index}']") for index, symbol in enumerate(self.symbols)}
        for symbol, number in zip(self.symbols, numbers, strict=True):
            if number.node.expr != symbol:
                if not number.node.expr.free_symbols <= sources.keys():
                    return None
                lines.append(f"{sources[symbol]} == {number.node.expr.xreplace(sources)}")
        return " and ".join(lines)

    def holds(self, guards: str | None) -> bool:
        """Whether guards of another `Sizes` hold for these; if so they become guards of this graph too. None never holds."""
        if self.environment is None or not guards:
            return guards == ""
        # First on the traced sizes, because a guard that fails on symbols would add its negation as a guard.
        if not self.environment.evaluate_guards_expression(guards, self.seen()):
            return False
        return bool(self.environment.evaluate_guards_expression(guards, self._as_numbers()))

    def _as_numbers(self) -> list[Any]:
        return [self.environment.create_symintnode(symbol, hint=None) for symbol in self.symbols]


def _numbers(inputs: Sequence[Any]) -> Iterator[Any]:
    for value in inputs:
        every = (*value.size(), *value.stride(), value.storage_offset()) if isinstance(value, Tensor) else (value,)
        yield from (each for each in every if isinstance(each, SymInt | SymFloat | SymBool))
