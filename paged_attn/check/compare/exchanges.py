"""Other choices that a token's router might have made: one or two of the best k replaced by experts chosen in another run.

With ten of 512 experts a token has many near ties. Runs at random seldom come upon the very choice that was served, but they soon show
which experts are as good as which.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_attn.check.runs.choices import Choices

MOST_AT_ONCE = 2  # experts replaced in one exchange
MOST = 32  # exchanges tried for one token and one choice


class Exchange(NamedTuple):
    """In one row of an operation's choice, the experts `left` are replaced by `taken`."""

    name: str
    row: int
    left: tuple[int, ...]
    taken: tuple[int, ...]


class Exchanges:
    """The exchanges of one prompt.

    Args:
        usual: the original's choices.

    Attributes:
        names: of the operations that choose the best k, in order.
    """

    def __init__(self, usual: Choices) -> None:
        self._usual = usual
        self.names: Sequence[str] = [name for name, result in usual.items() if _best(result) is not None]
        self._best = self._rows_of(usual)
        self._seen: list[dict[str, list[set[int]]]] = []
        self._given = set[Exchange]()

    def see(self, choices: Choices) -> None:
        """Records the choices of another run of the original."""
        self._seen.append(self._rows_of(choices))

    def untried(self, name: str, row: int) -> Exchange | None:
        """The likeliest exchange that was not returned before."""
        for exchange in itertools.islice(self._likeliest(name, row), MOST):
            if exchange not in self._given:
                self._given.add(exchange)
                return exchange
        return None

    def made(self, exchanges: Iterable[Exchange]) -> Choices:
        """The choices of operations with these exchanges; nothing for operations without any."""
        chosen: dict[str, Tensor] = {}
        for name, row, left, taken in exchanges:
            indices = chosen.setdefault(name, self._usual[name][1].clone(memory_format=torch.contiguous_format))
            at = indices.view(-1, indices.shape[-1])[row]
            for one, other in zip(left, taken, strict=True):
                at[at == one] = other
        return {name: (self._usual[name][0], indices) for name, indices in chosen.items()}

    def _likeliest(self, name: str, row: int) -> Iterator[Exchange]:
        left, taken = Counter[int](), Counter[int]()
        usual = self._best[name][row]
        for each in self._seen:
            left.update(usual - each[name][row])
            taken.update(each[name][row] - usual)
        for count in range(1, MOST_AT_ONCE + 1):
            pairs = itertools.product(itertools.combinations(left, count), itertools.combinations(taken, count))
            for one, other in sorted(pairs, key=lambda pair: -sum(left[i] for i in pair[0]) * sum(taken[i] for i in pair[1])):
                yield Exchange(name, row, one, other)

    def _rows_of(self, choices: Choices) -> dict[str, list[set[int]]]:
        return {name: [*map(set, choices[name][1].flatten(end_dim=-2).tolist())] for name in self.names}


def _best(result: Any) -> Tensor | None:
    """The indices [..., k] of the best k, if the operation returns such."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and all(isinstance(each, Tensor) for each in result)
    return result[1] if is_pair and result[1].dtype == torch.int64 and result[1].dim() > 1 else None
