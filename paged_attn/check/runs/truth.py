"""The original graph's values at every boundary for a few prompts, each alone; and how far other runs of it deviate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_attn.check.runs.boundaries import Boundary
from paged_attn.check.runs.served import AS_IT_IS, HowToRun, Original
from paged_attn.tolerances import row_errors, row_lengths, typical

LOGITS = "the logits"  # name of the graph's output in comparisons
UNRELATED = 0.5  # more than what most rows are off by whatever rounding does; rows of other tokens are off by 1.4


class Truth:
    """Runs the original graph on each prompt alone and keeps, for every boundary and whatever else it taps, a row for each token.

    Attributes:
        prompts: [T] int64 each.
        others: requests that run beside them in what is served; nothing is known of them.
        logits: [T, vocabulary] of each prompt.
        names: the boundaries' nodes that have one row for each token: one axis of length T, whatever the prompt; and LOGITS.
        usual: by name, the usual length of such a row.

    Values without such an axis (a number, a mask of tokens against tokens) are neither compared nor replaced; nor are those of
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
        """Leave out what has as many rows as tokens and in another order, such as tokens sorted by their experts: its first `count` rows
        are others in a run of so many tokens, while the logits are the same."""
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

    def has_rows(self, name: str) -> bool:
        return name in self._axes

    def rows(self, prompt: int, name: str) -> Tensor:
        """[T, ...] as the original computes it."""
        return self._rows[prompt][name]

    def written(self, prompt: int, name: str) -> Tensor:
        """The same as the paged op writes it: attention [T, heads, v_dim]."""
        return self._written[prompt].get(name, self._rows[prompt][name])

    def served(self, prompt: int, name: str, boundary: Boundary | None) -> Tensor:
        """Rows as what is served has them at a boundary; None for the logits."""
        rows = self.written(prompt, name)
        return rows if boundary is None or boundary.operand is None else boundary.operand.of(rows)

    def rows_of(self, name: str, value: Tensor) -> Tensor:
        """A value of any run with its rows first: a view."""
        return value.movedim(self._axes[name], 0)

    def written_of(self, name: str, value: Tensor) -> Tensor:
        """A value of any run of the original as the paged op writes it: a view, or a copy."""
        return self._attention[name].as_written(value) if name in self._attention else self.rows_of(name, value)

    def with_rows(self, name: str, value: Tensor, rows: Tensor, at: Tensor | None = None) -> Tensor:
        """A copy of a value, laid out like it, whose rows `at` [N], by default the first ones, are these."""
        copied = value.clone()
        self.rows_of(name, copied)[slice(len(rows)) if at is None else at] = rows.to(value.dtype)
        return copied

    def laid_out(self, name: str, rows: Tensor) -> Tensor:
        """Rows [N, ...] of a name, as a value of the original on N tokens is laid out."""
        return rows.movedim(0, self._axes[name])


class OtherRun:
    """Another run of the original, of which the first rows should be what they are in truth: keeps how far they are off, and lets the run
    go on from the truth, so that no error adds to an earlier one.

    Args:
        prompt: the index of the one whose truth it is.
        how: of `Original.run`; with `perturbed` the run goes on from the truth with its numbers moved so, too.
        tokens: what is run, by default that prompt.
        count: of the rows that are compared, by default all.

    Attributes:
        errors: by name, of each row [count].
        rows: by name, as `Truth.written`.
        chosen_before: by name, how many choices a perturbed run had made when it came there.
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
    """The one axis that is as long as each prompt, where the others do not depend on it."""
    if len({value.dim() for value in values}) != 1 or len(set(lengths)) < 2:
        return None
    axes = [axis for axis in range(values[0].dim()) if [value.shape[axis] for value in values] == list(lengths)]
    if len(axes) != 1 or len({value.shape[: axes[0]] + value.shape[axes[0] + 1 :] for value in values}) != 1:
        return None
    return axes[0]
