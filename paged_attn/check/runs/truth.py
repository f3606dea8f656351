"""The original graph's values at every boundary for a few prompts, each alone; and how far other runs of it deviate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_attn.check.runs.boundaries import Boundary
from paged_attn.check.runs.served import AS_IT_IS, HowToRun, Original
from paged_attn.tolerances import row_errors, row_lengths, typical

LOGITS = "the logits"  # name of the graph's output in comparisons
UNRELATED = 0.5  # rounding never moves most rows this far; rows of different tokens are 1.4 apart


class Truth:
    """Runs the original graph on each prompt alone and keeps one row per token for every boundary and other tapped value.

    Attributes:
        prompts: [T] int64 each.
        others: requests that run beside them in the served model; their values are not kept.
        logits: [T, vocabulary] of each prompt.
        names: boundaries' nodes with one row per token (one axis of length T for every prompt), and LOGITS.
        usual: by name, the usual length of such a row.

    Values without such an axis (a number, a mask of tokens against tokens) are neither compared nor replaced; nor are those found by
    `forget_other_orders`.
    """

    def __init__(
        self, original: Original, boundaries: Sequence[Boundary], prompts: Sequence[Tensor], others: Sequence[Tensor] = ()
    ) -> None:
        self.prompts, self.others = list(prompts), list(others)
        self._attention = {boundary.original: boundary for boundary in boundaries if boundary.layer is not None}
        seen: list[dict[str, Tensor]] = []
        self.logits: list[Tensor] = []
        for prompt in prompts:
            kept: dict[str, Tensor] = {}

            def keep(name: str, value: Tensor, kept: dict[str, Tensor] = kept) -> Tensor:
                kept[name] = value.clone()
                return value

            self.logits.append(original.run(prompt, keep))
            seen.append(kept)
        lengths = [original.padded_length(len(prompt)) for prompt in prompts]
        self._axes = {name: axis for name in seen[0] if (axis := _row_axis([kept[name] for kept in seen], lengths)) is not None}
        self._rows = [
            {name: kept[name].movedim(axis, 0)[: len(prompt)].contiguous() for name, axis in self._axes.items()}
            for kept, prompt in zip(seen, prompts, strict=True)
        ]
        self._written = [
            {name: self.written_of(name, kept[name])[: len(prompt)].contiguous() for name in self._axes if name in self._attention}
            for kept, prompt in zip(seen, prompts, strict=True)
        ]
        for rows, logits in zip(self._rows, self.logits, strict=True):
            rows[LOGITS] = logits
        self._axes[LOGITS] = 0
        self.names = frozenset(self._axes).intersection({LOGITS, *(boundary.original for boundary in boundaries)})
        self.usual = {name: typical(torch.cat([row_lengths(rows[name]) for rows in self._rows])) for name in self._axes}

    def forget_other_orders(self, original: Original, prompt: int, count: int) -> None:
        """Excludes values with one row per token in another order, such as tokens sorted by expert: in a run of `count` tokens their first
        `count` rows differ, while the logits are the same."""
        errors: dict[str, float] = {}

        def compare(name: str, value: Tensor) -> Tensor:
            if name in self._axes:
                rows = self.rows(prompt, name)[:count]
                errors[name] = typical(row_errors(rows, self.rows_of(name, value)[:count], self.usual[name]))
            return value

        compare(LOGITS, original.run(self.prompts[prompt][:count], compare))
        if errors[LOGITS] <= UNRELATED:
            others = {name for name, error in errors.items() if error > UNRELATED}
            self.names -= others
            self._axes = {name: axis for name, axis in self._axes.items() if name not in others}

    @property
    def first_infinite(self) -> str | None:
        """The first value, in the order of the graph, that is NaN or infinite for some token; minus infinity only hides something."""
        floating = [name for name, rows in self._rows[0].items() if rows.is_floating_point()]
        return next((n for n in floating if any(bool((rows[n].isnan() | (rows[n] == torch.inf)).any()) for rows in self._rows)), None)

    def has_rows(self, name: str) -> bool:
        return name in self._axes

    def rows(self, prompt: int, name: str) -> Tensor:
        """[T, ...] as the original computes it."""
        return self._rows[prompt][name]

    def written(self, prompt: int, name: str) -> Tensor:
        """[T, ...] as the paged op writes it: attention [T, heads, v_dim]."""
        return self._written[prompt].get(name, self._rows[prompt][name])

    def served(self, prompt: int, name: str, boundary: Boundary | None) -> Tensor:
        """[T, ...] in the layout of the served model at a boundary; None: the logits."""
        rows = self.written(prompt, name)
        return rows if boundary is None or boundary.operand is None else boundary.operand.of(rows)

    def rows_of(self, name: str, value: Tensor) -> Tensor:
        """A value of any run with the axis of rows first; a view."""
        return value.movedim(self._axes[name], 0)

    def written_of(self, name: str, value: Tensor) -> Tensor:
        """A value of any run of the original in the paged op's layout; a view or a copy."""
        return self._attention[name].as_written(value) if name in self._attention else self.rows_of(name, value)

    def with_rows(self, name: str, value: Tensor, rows: Tensor, at: Tensor | None = None) -> Tensor:
        """A copy of a value with the rows `at` [N], by default the first ones, replaced by `rows`."""
        copied = value.clone()
        self.rows_of(name, copied)[slice(len(rows)) if at is None else at] = rows.to(value.dtype)
        return copied

    def laid_out(self, name: str, rows: Tensor) -> Tensor:
        """Rows [N, ...] in the layout of the original's value for N tokens."""
        return rows.movedim(0, self._axes[name])


class OtherRun:
    """Another run of the original whose first rows should equal the truth: keeps their errors, and continues from the truth, so that errors
    do not add up.

    Args:
        prompt: index of the prompt whose truth it is.
        how: see `Original.run`; with `perturbed`, the run continues from the perturbed truth.
        tokens: the tokens to run, by default that prompt.
        count: number of rows to compare, by default all.

    Attributes:
        errors: by name, of each row [count].
        rows: by name, as in `Truth.written`.
        chosen_before: by name, the number of choices made before it in a perturbed run.
    """

    def __init__(
        self,
        original: Original,
        truth: Truth,
        prompt: int,
        how: HowToRun = AS_IT_IS,
        tokens: Tensor | None = None,
        count: int | None = None,
    ) -> None:
        self.truth, self.prompt, self.perturbed, self.narrow = truth, prompt, how.perturbed, original.narrow
        self.count = len(truth.prompts[prompt]) if count is None else count
        self.errors: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.chosen_before: dict[str, int] = {}
        tokens = truth.prompts[prompt] if tokens is None else tokens
        self._visit(LOGITS, original.run(tokens, self._visit, how))

    def _visit(self, name: str, value: Tensor) -> Tensor:
        if name not in self.truth.names:
            return value
        expected = self.truth.rows(self.prompt, name)[: self.count]
        self.rows[name] = self.truth.written_of(name, value)[: self.count].clone()
        self.errors[name] = row_errors(expected, self.truth.rows_of(name, value)[: self.count], self.truth.usual[name])
        if self.perturbed is not None:
            self.chosen_before[name] = len(self.perturbed.choices)
        if self.perturbed is not None and expected.is_floating_point():
            expected = self.perturbed.moved(expected, self.narrow)
        return self.truth.with_rows(name, value, expected)


def _row_axis(values: Sequence[Tensor], lengths: Sequence[int]) -> int | None:
    """The one axis that has each prompt's length, if all other axes are the same for every prompt."""
    if len({value.dim() for value in values}) != 1 or len(set(lengths)) < 2:
        return None
    axes = [axis for axis in range(values[0].dim()) if [value.shape[axis] for value in values] == list(lengths)]
    if len(axes) != 1 or len({value.shape[: axes[0]] + value.shape[axes[0] + 1 :] for value in values}) != 1:
        return None
    return axes[0]
