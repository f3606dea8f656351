"""Checks that a later token changes no earlier row: otherwise the model cannot generate token by token."""

from __future__ import annotations

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.check.compare.noise import Noise
from paged_attn.check.compare.suspects import suspects_in, unexplained
from paged_attn.check.runs.served import Original
from paged_attn.check.runs.steps import LONGEST, ProbeSettings
from paged_attn.check.runs.truth import OtherRun, Truth


def check_later_tokens(original: Original, truth: Truth, noise: Noise, settings: ProbeSettings) -> None:
    """Changes the last token of the longest probe prompt, and compares the rows before it at every boundary. Raises UnsupportedError: a row
    moves by more than rounding; the message names where it moves first."""
    prompt = truth.prompts[LONGEST]
    if len(prompt) < 2:
        return
    changed, before = prompt.clone(), prompt[:-1]
    changed[-1] = before.max() if changed[-1] != before.max() else before.min()
    count = len(before)
    run = OtherRun(original, truth, LONGEST, tokens=changed, count=count)
    rows = [(LONGEST, row) for row in range(count)]
    found = [
        suspect
        for name, errors in run.errors.items()
        for suspect in suspects_in(name, errors, noise.limits(name, LONGEST, 0, count), rows, run.rows[name], "its last token changed")
    ]
    found = unexplained(found, original, truth, noise, settings)
    if not settings.fails(bool(found)):
        return
    first = found[0]
    raise UnsupportedError(
        f"self-check failed: changing the last of {len(prompt)} tokens moves token {first.row + 1} in "
        f"{original.module_of(first.name)} by {first.error:.2g} of its size (allowed {first.limit:.2g}), so that the model is not "
        "causal there; it cannot be generated from token by token."
    )
