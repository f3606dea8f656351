"""Lets Inductor's kernels hold a short row whole, in whatever order its numbers lie.

Inductor holds a row of up to 1,024 numbers in registers (a persistent reduction) if the row is read in order, and otherwise loops over it
with the whole block as one row's. A norm after a rotation of neighbouring numbers reads them out of order: with 40 heads of 128 it took
42 us for 8 tokens and 1,294 for 8,192; held whole, 6.5 and 413 (H200, docs/lab/measurements.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from paged_attn.capture.inductor.cache_mark import marked

LONGEST = 1024  # numbers of a row; Inductor's own bound for rows that are read in order


@contextlib.contextmanager
def short_rows_whole() -> Iterator[None]:
    """Inside, reductions over at most `LONGEST` numbers that Inductor knows no order for become persistent."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint

    decide = InductorChoices.should_use_persistent_reduction

    def decided(features: Any, cooperative_reduction: bool) -> bool:
        unordered = features.get_reduction_hint() == ReductionHint.DEFAULT
        numbers = features.reduction_numel
        if unordered and not cooperative_reduction and numbers.is_Integer and int(numbers) <= LONGEST:
            return True
        return decide(features, cooperative_reduction)

    with marked(f"rows of {LONGEST} whole"), patch.object(InductorChoices, "should_use_persistent_reduction", staticmethod(decided)):
        yield
