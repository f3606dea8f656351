"""Suspect rows: off by more than rounding explains, unless rounding in the model itself can lead to the same choice.

A router takes the best experts, an indexer the best keys, a quantiser the nearest step. Where two are as good as equal, any other order of
adding up takes the other one, and the row is another. So the original is run with all its numbers moved a little, many times over, and
each time once more with its own numbers and what was chosen then; and with what one or two of the router's choices were replaced by in
any of these runs. With ten of 512 experts a token has many near ties: runs at random seldom come upon the very choice that was served, but
they soon show which experts are as good as which. A suspect row is explained if it equals one of these, up to the effect of rounding on
that row; any other row is not the result of a choice of the model.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged_attn.check.compare.noise import Noise
from paged_attn.check.runs.boundaries import Boundary
from paged_attn.check.runs.choices import Choices, Perturbation, same_choices
from paged_attn.check.runs.served import HowToRun, Original
from paged_attn.check.runs.steps import ProbeSettings
from paged_attn.check.runs.truth import OtherRun, Truth
from paged_attn.tolerances import MULTIPLE, row_errors

TRIES, UNITS = 32, (1.0, 4.0, 2.0, 4.0)  # runs, and how far numbers are perturbed: larger units flip more ties
MORE = 64  # further runs, for rows that rounding moves far in only a few: a peaked router has few distinct values in 16 bits
UNEVEN = 1.5  # rounding is uneven if its largest effect exceeds its usual one by this factor
ENOUGH = 4  # runs needed to tell how far rounding moves a row
FARTHEST = 2  # factor on the farthest of those runs
EVERY = 8  # after this many runs, exchanges between their choices are tried
BACK = 4  # preceding choices tried per row, one of which it depends on: groups of experts, and experts in them, are chosen in turn
MOST_AT_ONCE = 2  # experts replaced in one exchange
MOST = 32  # exchanges tried for one token and one choice


@dataclass(frozen=True, eq=False)
class Suspect:
    """One row at one boundary that differs from the truth.

    Attributes:
        name: the boundary's node.
        prompt, row: index of the prompt, and of the token in it.
        error, limit: its error, and the error that rounding explains.
        got: the row, as in `Truth.written`.
        step: the step in which it was seen.
        boundary: None for the logits.
    """

    name: str
    prompt: int
    row: int
    error: float
    limit: float
    got: Tensor
    step: str
    boundary: Boundary | None = None


def suspects_in(
    name: str, errors: Tensor, limits: Tensor, rows: Sequence[tuple[int, int]], got: Tensor, step: str, boundary: Boundary | None = None
) -> list[Suspect]:
    """The rows whose errors exceed their limits [N]; `rows`: (prompt, token) of each."""
    wrong = torch.nonzero(~(errors.cpu() <= limits)).flatten().tolist()
    return [Suspect(name, rows[i][0], rows[i][1], float(errors[i]), float(limits[i]), got[i].clone(), step, boundary) for i in wrong]


def unexplained(suspects: Sequence[Suspect], original: Original, truth: Truth, noise: Noise, settings: ProbeSettings) -> list[Suspect]:
    """The suspects that no rounding of the original explains, in order. All ranks of a sharded model run it as often as the rank that needs
    the most runs."""
    left: list[Suspect] = []
    for prompt in range(len(truth.prompts)):
        rows = [_Row(suspect, truth, noise) for suspect in suspects if suspect.prompt == prompt]
        generator = torch.Generator(truth.prompts[prompt].device).manual_seed(prompt)
        chosen: Choices | None = None
        exchanged: _Exchanged | None = None
        for attempt in range(TRIES + MORE):
            units = UNITS[attempt % len(UNITS)] if attempt < TRIES else 1.0
            if not settings.any_rank(bool(rows) and (attempt < TRIES or all(row.is_uneven for row in rows))):
                break
            if units != 1 and not settings.any_rank(chosen != {}):
                continue  # larger perturbations help only if they change choices
            moved = Perturbation(generator, units)
            near = OtherRun(original, truth, prompt, HowToRun(perturbed=moved))
            if is_new := settings.any_rank(chosen is None or not same_choices(chosen, moved.choices)):
                chosen = moved.choices
                exact = OtherRun(original, truth, prompt, HowToRun(choices=chosen))
                if chosen:
                    exchanged = exchanged or _Exchanged(original, truth, prompt, generator)
                    exchanged.exchanges.see(chosen)
            for row in rows:
                if is_new:
                    row.see_chosen(exact)
                if units == 1:
                    row.see_moved(near, exact)
            rows = [row for row in rows if not row.explained]
            if exchanged is not None and attempt % EVERY == EVERY - 1:
                rows = exchanged.unexplained(rows, settings)
        left += [row.suspect for row in rows]
    return [suspect for suspect in suspects if suspect in left]


class _Exchanged:
    """Runs of one prompt with the original's numbers, in which single tokens take choices seen in other runs."""

    def __init__(self, original: Original, truth: Truth, prompt: int, generator: torch.Generator) -> None:
        self.original, self.truth, self.prompt = original, truth, prompt
        unmoved = Perturbation(generator, 0.0)
        self._chosen_before = OtherRun(original, truth, prompt, HowToRun(perturbed=unmoved)).chosen_before
        self._order = list(unmoved.choices)
        self.exchanges = Exchanges(unmoved.choices)

    def unexplained(self, rows: list[_Row], settings: ProbeSettings) -> list[_Row]:
        """The rows that no exchange explains either."""
        for back in range(1, BACK + 1):
            while True:
                of_tokens = {(name, row.suspect.row) for row in rows for name in self._before(row.suspect)[-back:][:1]}
                found = [self.exchanges.untried(*each) for each in sorted(of_tokens)]
                exchanges = [each for each in found if each is not None]
                if not settings.any_rank(bool(exchanges)):
                    break
                run = OtherRun(self.original, self.truth, self.prompt, HowToRun(choices=self.exchanges.made(exchanges)))
                for row in rows:
                    row.see_chosen(run)
                rows = [row for row in rows if not row.explained]
        return rows

    def _before(self, suspect: Suspect) -> Sequence[str]:
        """The names of the choices made before it, in order."""
        before = self._order[: self._chosen_before[suspect.name]]
        return [name for name in before if name in self.exchanges.names]


class _Row:
    """A suspect, compared with the same row in runs of the original.

    `off`: distance from the nearest of the original's rows with some choices; `own`: how far rounding alone moves these.
    """

    def __init__(self, suspect: Suspect, truth: Truth, noise: Noise) -> None:
        self.suspect, self.operand = suspect, None if suspect.boundary is None else suspect.boundary.operand
        self.usual = None if self.operand is not None else truth.usual[suspect.name]
        self.limit = noise.limit(suspect.name)
        self.off, self.own, self.is_like_a_moved_one = suspect.error, list[float](), False

    def see_chosen(self, exact: OtherRun) -> None:
        self.off = min(self.off, self._apart(self._of(exact), self.suspect.got))

    def see_moved(self, moved: OtherRun, exact: OtherRun) -> None:
        """Records a perturbed run, and an exact one with the same choices."""
        near = self._of(moved)
        self.own.append(self._apart(self._of(exact), near))
        self.is_like_a_moved_one |= self._apart(near, self.suspect.got) <= self.limit

    @property
    def is_uneven(self) -> bool:
        return max(self.own) > UNEVEN * self._usually

    @property
    def _usually(self) -> float:
        return sorted(self.own)[len(self.own) // 2]

    @property
    def explained(self) -> bool:
        allowed = self.limit
        if len(self.own) >= ENOUGH:
            allowed = max(allowed, MULTIPLE * self._usually, FARTHEST * max(self.own))
        return self.is_like_a_moved_one or self.off <= allowed

    def _of(self, run: OtherRun) -> Tensor:
        row = run.rows[self.suspect.name][self.suspect.row][None]
        return row if self.operand is None else self.operand.of(row)

    def _apart(self, expected: Tensor, got: Tensor) -> float:
        return float(row_errors(expected.reshape(1, -1), got.reshape(1, -1), self.usual)[0])


class Exchange(NamedTuple):
    """In one row of an operation's choice, the experts `left` are replaced by `taken`."""

    name: str
    row: int
    left: tuple[int, ...]
    taken: tuple[int, ...]


class Exchanges:
    """The exchanges of one prompt. `usual`: the original's choices. `names`: of the operations that choose the best k, in order."""

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
