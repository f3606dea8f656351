"""Tells Inductor when a reduction runs along rows, although it does not read them in order.

Inductor takes a reduction whose numbers are not next to each other for one of columns, and loops over it in blocks that suit columns.
A norm after a rotation of neighbouring numbers is none: its numbers are those of one row, out of order. With 40 heads of 128 it took
42 us for 8 tokens and 1,294 for 8,192, in that way (H200, docs/lab/measurements.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import sympy

from paged_attn.capture.inductor.cache_mark import marked


@contextlib.contextmanager
def rows_in_any_order() -> Iterator[None]:
    """Inside, a reduction is one of columns only if neighbouring rows are neighbours in memory, and else one along rows (`INNER`)."""
    from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
    from torch._inductor.runtime.hints import ReductionHint

    decide = SIMDKernelFeatures.get_reduction_hint

    def decided(features: Any, *args: Any, **kwargs: Any) -> Any:
        hint = decide(features, *args, **kwargs)
        if hint not in (ReductionHint.OUTER, ReductionHint.DEFAULT) or not features.reduction_nodes():
            return hint
        columns = any(_of_columns(node, features.reduction_numel) for node in features.reduction_nodes())
        return hint if columns else ReductionHint.INNER

    with marked("rows in any order"), patch.object(SIMDKernelFeatures, "get_reduction_hint", decided):
        yield


def _of_columns(node: Any, numbers: sympy.Expr) -> bool:
    """Does the reduction read a number of one row beside the same number of the next, or nothing that tells?"""
    from torch._inductor.dependencies import MemoryDep

    reads = [read for read in node.read_writes.reads if isinstance(read, MemoryDep)]
    told = [(read, rows) for read in reads if (rows := _rows(read, numbers)) is not None]
    return not told or any(read.index.coeff(row) == 1 for read, rows in told for row in rows)


def _rows(read: Any, numbers: sympy.Expr) -> list[sympy.Symbol] | None:
    """The variables of a read that count rows: those before the ones that count a row's `numbers`. None if it does not read all numbers."""
    names, left = list(read.var_names), numbers
    for size in reversed(read.size):
        if left == 1 or not isinstance(left, sympy.Integer) or not isinstance(size, sympy.Integer) or left % size:
            break
        names.pop()
        left //= size
    return names if left == 1 else None
