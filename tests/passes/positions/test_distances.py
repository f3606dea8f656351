"""Which numbers of a graph may be distances between its tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.passes.positions import independent_rows
from paged_attn.passes.positions.distances import distances
from tests.passes.graphs import Toy, rewrite_of
from tests.passes.positions.test_independent_rows import Changed, refusal_of

Change = Callable[[Tensor, Tensor], Tensor]


def found(change: Change, sizes: set[int]) -> list[int]:
    result = rewrite_of(Toy(Changed(change)))
    assert result.gm is not None, result.not_paged
    return distances(result.gm.graph, result.form, sizes, 500, 5000)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda q, pos: F.pad(q, (700, 0))[..., 700:], []),  # along the head dim
        (lambda q, pos: F.pad(q, (0, 0, 700, 0))[:, :, 700:], [700]),
        (lambda q, pos: torch.cat([q, q.new_zeros(1, 4, 640, 8)], 2)[:, :, :-640], [640]),
        (lambda q, pos: q * (pos[:, None, :, None] % 1200), [1200]),
        (lambda q, pos: q * 900.5 * 6000, []),
    ],
)  # fmt: skip
def test_what_lies_along_other_dims_is_none(change: Change, expected: list[int]) -> None:
    assert found(change, set()) == expected


def test_a_size_of_the_model_counts_only_where_tokens_are_moved() -> None:
    assert found(lambda q, pos: F.pad(q, (0, 0, 700, 0))[:, :, 700:] * (pos[:, None, :, None] % 1200), {700, 1200}) == [700]


def test_products_with_weights_are_drawn_for_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a row that a weight multiplies after a shift is still seen to be another one's."""
    weight = torch.nn.Parameter(torch.randn(8, 8))

    class Multiplied(Changed):
        def __init__(self) -> None:
            super().__init__(lambda q, pos: F.linear(F.pad(F.linear(q, self.weight), (0, 0, 2000, 0))[:, :, : q.shape[2]], self.weight))
            self.weight = weight

    drawn = list[int]()
    product = independent_rows._Run._product

    def counted(run: independent_rows._Run, *given: object) -> object:
        drawn.append(run.tokens)
        return product(run, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(independent_rows._Run, "_product", counted)
    assert refusal_of(Toy(Multiplied())).module == "attend"
    assert drawn and min(drawn) > 2000
