"""Lets Inductor see through reshapes that fold heads into rows and back, whose number of rows is a symbol.

[T, H, D] -> [T H, D] -> a norm of each head -> [T, H D]: Inductor numbers the elements of the second reshape through one flat index, modulo
T H. It cannot know that nothing exceeds T H, so it takes the result for another order of elements, and copies it in a kernel of its own.
Here T is set aside, and the rest, whose sizes are numbers, is reshaped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from paged_attn.capture.inductor.cache_mark import marked

Reindex = Callable[[Sequence[Any]], Sequence[Any]]


@contextlib.contextmanager
def rows_set_aside() -> Iterator[None]:
    """Inside, a reshape between [n T, ...] and [m T, ...] is one of the numbers behind T, for any T."""
    from torch._inductor.ir import View

    reshape = View._dynamic_reshape_indexer

    def indexer(old: Sequence[Any], new: Sequence[Any], *dense_dim: Any) -> Any:
        ones = _leading_ones(old), _leading_ones(new)
        (of_old, before), (of_new, after) = (_multiple(size, skipped) for size, skipped in zip((old, new), ones, strict=True))
        if any(each is not None for each in dense_dim) or before is None or before != after or of_old == of_new:
            return reshape(old, new, *dense_dim)
        inside = reshape([of_old, *old[ones[0] + 1 :]], [of_new, *new[ones[1] + 1 :]])

        def reindex(index: Sequence[Any]) -> Sequence[Any]:
            folded, *others = index[ones[1] :]
            first, *rest = inside([ModularIndexing(folded, 1, of_new), *others])
            return (*[sympy.S.Zero] * ones[0], FloorDiv(folded, of_new) * of_old + first, *rest)

        return reindex

    with marked("rows set aside"), patch.object(View, "_dynamic_reshape_indexer", staticmethod(indexer)):
        yield


def _leading_ones(sizes: Sequence[Any]) -> int:
    return next((index for index, size in enumerate(sizes) if size != 1), len(sizes))


def _multiple(sizes: Sequence[Any], skipped: int) -> tuple[sympy.Expr | None, sympy.Symbol | None]:
    """n and T, if the first size that is not one of the `skipped` ones is n T."""
    size = sizes[skipped] if skipped < len(sizes) else None
    times, symbol = size.as_coeff_Mul() if isinstance(size, sympy.Expr) else (None, None)
    return (times, symbol) if isinstance(times, sympy.Integer) and isinstance(symbol, sympy.Symbol) else (None, None)
