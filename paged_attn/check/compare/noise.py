"""What rounding does to a model, measured on the model itself.

At every boundary the original graph is compared with other runs of itself:

- in wider numbers;
- with its recurrent layers run token by token, as decoding runs them;
- on a shorter prompt: products of another shape round otherwise, and some quantisers look at the whole batch.

Each run goes on from the same values at every boundary, so nothing adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.check.runs.served import HowToRun, Original
from paged_attn.check.runs.steps import LONGEST
from paged_attn.check.runs.truth import OtherRun, Truth
from paged_attn.tolerances import MULTIPLE, OTHERWISE, QUANTISED, rounding, typical

FEW = (2, 3)  # token counts for which kernels of quantised products may take another path


class Noise:
    """The noise of one model on its probe prompts.

    Args:
        causal: whether later tokens must not change earlier rows, so that a prompt may be cut.
        borders: `length_borders` of `ProbeSettings`.

    Attributes:
        level: by boundary, the error that rounding causes in most rows.

    Raises:
        UnsupportedError: later tokens change earlier rows.
    """

    def __init__(self, original: Original, truth: Truth, causal: bool, borders: Sequence[int]) -> None:
        self.original, self.truth = original, truth
        self.level: dict[str, float] = dict.fromkeys(truth.names, 0.0)
        self._rows: dict[tuple[int, str], Tensor] = {}
        for prompt in range(len(truth.prompts)):
            self._add(OtherRun(original, truth, prompt, HowToRun(wide=True)).errors, prompt)
            if original.recurrent:
                self._add(OtherRun(original, truth, prompt, HowToRun(token_by_token=True)).errors, prompt)
        if causal:
            longest = truth.prompts[LONGEST]
            counts = {max(len(longest) * 2 // 3, 1), *(few for few in FEW if few < len(longest))}
            counts = {each for each in counts if not any(each <= border < len(longest) for border in borders)}
            if counts:
                truth.forget_other_orders(original, LONGEST, max(counts))
            for count in sorted(counts):
                shorter = OtherRun(original, truth, LONGEST, tokens=longest[:count], count=count).errors
                self._refuse_more_than_rounding(shorter, count)
                self._add(shorter, None)

    def _add(self, errors: Mapping[str, Tensor], prompt: int | None) -> None:
        """Adds errors [T] by boundary from a run that differs only by rounding. With `prompt`, each row's own error is allowed as well,
        since rounding may have changed a router's choice there."""
        for name, rows in errors.items():
            self.level[name] = max(self.level[name], typical(rows))
            if prompt is not None:
                known = self._rows.get((prompt, name))
                self._rows[prompt, name] = rows if known is None else torch.maximum(known, rows)

    def limit(self, name: str) -> float:
        """The allowed error of a row."""
        dtype = self.truth.rows(0, name).dtype
        return MULTIPLE * max(self.level[name], rounding(dtype, self.original.narrow))

    def limits(self, name: str, prompt: int, start: int, end: int) -> Tensor:
        """The allowed error of each of these rows of a prompt, [end - start] on the CPU."""
        own = self._rows.get((prompt, name))
        if own is None:
            return torch.full((end - start,), self.limit(name))
        return (MULTIPLE * own[start:end]).clamp_min(self.limit(name)).cpu()

    def _refuse_more_than_rounding(self, errors: Mapping[str, Tensor], count: int) -> None:
        for name, rows in errors.items():
            limit = OTHERWISE * self.limit(name)
            allowed = max(limit, QUANTISED) if self.original.computed_as_it_is else limit
            if not typical(rows) <= allowed:
                more, where = len(self.truth.prompts[LONGEST]) - count, self.original.module_of(name)
                raise UnsupportedError(
                    f"self-check failed: {count} tokens give other numbers in {where} when {more} more follow them, "
                    f"off by {typical(rows):.2g} of their size (allowed {allowed:.2g}). A later token moves earlier ones, so that the "
                    "model cannot be generated from token by token."
                )
