"""Rows that are off by more than rounding explains, until it is seen that the model's own rounding may choose that, too.

A router takes the best experts, an indexer the best keys, a quantiser the nearest step. Where two are as good as equal, any other order of
adding up takes the other one, and the row is another. So a suspect row is compared with what the original gives for the same row when all
its numbers are moved by one rounding, many times over; what never comes out so is no choice of the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_attn.check.boundaries import Boundary
from paged_attn.check.closeness import row_errors
from paged_attn.check.noise import Noise
from paged_attn.check.served import Original
from paged_attn.check.truth import OtherRun, Truth

TRIES = 32


@dataclass(frozen=True, eq=False)
class Suspect:
    """One row of one boundary that is not what it is in truth.

    Attributes:
        name: of the boundary's node.
        prompt, row: of which prompt, and of which of its tokens.
        error, limit: what it is off, and what rounding explains.
        got: the row, as `Truth.written`.
        step: in which step it was seen.
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
    """Of rows [N] with these errors and limits, the ones that are off by more; `rows` says prompt and token of each."""
    wrong = torch.nonzero(~(errors.cpu() <= limits)).flatten().tolist()
    return [
        Suspect(name, rows[i][0], rows[i][1], float(errors[i]), float(limits[i]), got[i].clone(), step, boundary)
        for i in wrong
    ]  # fmt: skip


def without_choices(suspects: Sequence[Suspect], original: Original, truth: Truth, noise: Noise) -> list[Suspect]:
    """Those of them that no rounding of the original explains, in order."""
    left = list(suspects)
    for prompt in {suspect.prompt for suspect in suspects}:
        generator = torch.Generator().manual_seed(prompt)
        for _ in range(TRIES):
            mine = [suspect for suspect in left if suspect.prompt == prompt]
            if not mine:
                break
            run = OtherRun(original, truth, prompt, perturbed=generator)
            chosen = [suspect for suspect in mine if _is_like(suspect, run, truth, noise)]
            left = [suspect for suspect in left if suspect not in chosen]
    return left


def _is_like(suspect: Suspect, run: OtherRun, truth: Truth, noise: Noise) -> bool:
    other, operand = run.rows[suspect.name][suspect.row][None], suspect.boundary.operand if suspect.boundary is not None else None
    if operand is not None:
        other = operand.of(other)
    error = row_errors(other.reshape(1, -1), suspect.got.reshape(1, -1), None if operand is not None else truth.usual[suspect.name])
    return bool(error[0] <= noise.limit(suspect.name))
