"""What the states of a new request hold before its first token, where that is not zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.program import NoOpFits
from paged_attn.recurrent.verify import difference
from paged_attn.tolerances import MULTIPLE, rounding

LOWEST = -1e38  # below all exponents; with -inf, a difference of two of them is NaN
FIRST = 8  # tokens, each of which is tried as the first one


@torch.no_grad()
def starts_of(layer: RecurrentLayer, maxima: Sequence[int]) -> list[float]:
    """The number that each of the module's states holds, known from its empty cache; if that has none, it is found by trial for states that
    are running maxima (indices in `maxima`), and 0 for others.

    Raises:
        NoOpFits: a state starts from several numbers.
    """
    known = [_number(state) for state in layer.template.empty]
    tried = [
        [number if start is None and index in maxima else start or 0.0 for index, start in enumerate(known)] for number in (0.0, LOWEST)
    ]
    if tried[0] == tried[1]:
        return tried[0]
    return next((starts for starts in tried if _gives_the_same(layer, starts)), tried[0])


def _number(state: Tensor | None) -> float | None:
    if state is None or not state.numel():
        return None
    first = state.flatten()[0]
    if not bool((state == first).all()):
        raise NoOpFits("its state starts from several numbers")
    return float(first)


def _gives_the_same(layer: RecurrentLayer, starts: Sequence[float]) -> bool:
    """Whether a first token gives the same after these numbers as from an empty cache."""
    given = layer.given
    allowed = MULTIPLE * rounding(layer.output_dtype, *(state.dtype for state in layer.spec.states))
    for token in range(min(FIRST, given[0].shape[1])):
        inputs = [value[:, token : token + 1] for value in given]
        states = [
            torch.full((1, *spec.shape), start, dtype=spec.dtype, device=given[0].device)
            for spec, start in zip(layer.spec.states, starts, strict=True)
        ]
        if not difference(layer.run(inputs, None), layer.run(inputs, states)) <= allowed:
            return False
    return True
