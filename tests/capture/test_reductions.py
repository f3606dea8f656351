"""Which reductions hold their rows whole: short ones in any order, and otherwise as Inductor decides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sympy
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint

from paged_attn.capture.inductor.reductions import LONGEST, short_rows_whole


@pytest.mark.parametrize(
    ("hint", "numbers", "cooperative", "whole"),
    [
        (ReductionHint.DEFAULT, sympy.Integer(128), False, True),
        (ReductionHint.DEFAULT, sympy.Integer(LONGEST), False, True),
        (ReductionHint.DEFAULT, sympy.Integer(LONGEST + 1), False, False),
        (ReductionHint.DEFAULT, sympy.Symbol("s0", integer=True), False, False),
        (ReductionHint.DEFAULT, sympy.Integer(128), True, False),
        (ReductionHint.OUTER, sympy.Integer(128), False, False),
    ],
)
def test_short_rows_are_held_whole(
    hint: ReductionHint, numbers: sympy.Expr, cooperative: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inductors = staticmethod(lambda features, cooperative_reduction: False)
    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", inductors)
    features = SimpleNamespace(get_reduction_hint=lambda: hint, reduction_numel=numbers)
    with short_rows_whole():
        assert InductorChoices().should_use_persistent_reduction(features, cooperative) is whole  # type: ignore[arg-type]
    assert InductorChoices().should_use_persistent_reduction(features, cooperative) is False  # type: ignore[arg-type]
