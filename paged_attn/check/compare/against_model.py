"""The traced graph beside the model itself, called as its users call it: what torch.compile saw must be what they get."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.check.compare.suspects import ENOUGH, ON_ANOTHER_RANK
from paged_attn.check.runs.choices import Perturbation
from paged_attn.check.runs.served import HowToRun, Original
from paged_attn.check.runs.steps import ProbeSettings
from paged_attn.check.runs.truth import Truth
from paged_attn.tolerances import MULTIPLE, rounding, row_errors, typical, worst

Logits = Callable[[Tensor], Tensor]


def check_against_model(model: Logits, original: Original, truth: Truth, name: str, settings: ProbeSettings) -> None:
    """Compare the logits of every probe prompt.

    They are mostly equal bit for bit. Where they are not (another kernel, a sum without a fixed order), rounding adds up over
    the layers, more in some rows than in others, and what it may do is measured on the graph itself: in wider numbers, and with all numbers
    moved a little for rows that are off by more than rounding does to most.

    Args:
        model: of a prompt [T] -> [T, vocabulary].
        name: the model's, for messages.

    Raises:
        UnsupportedError: they differ by more.
    """
    pairs = [(model(prompt), logits) for prompt, logits in zip(truth.prompts, truth.logits, strict=True)]
    check_rows(truth.prompts, [expected for expected, _ in pairs], False)
    if not settings.any_rank(not all(expected.dtype == got.dtype and torch.equal(expected, got) for expected, got in pairs)):
        return

    def moved_by(prompt: int, how: HowToRun) -> Tensor:
        return row_errors(truth.logits[prompt], original.run(truth.prompts[prompt], _as_it_is, how))

    errors = [row_errors(expected, got) for expected, got in pairs]
    by_rounding = [moved_by(prompt, HowToRun(wide=True)) for prompt in range(len(pairs))]
    level = max(typical(torch.cat(by_rounding)), rounding(original.narrow, truth.logits[0].dtype))
    limit = MULTIPLE * level
    chosen = sum(int((rows > limit).sum()) for rows in by_rounding)  # in which rounding changed what a router chose
    wrong = []
    for prompt, rows in enumerate(errors):
        limits = torch.full_like(rows, limit)
        if settings.any_rank(bool((~(rows <= limits)).any())):
            generator = torch.Generator().manual_seed(prompt)
            runs = [moved_by(prompt, HowToRun(perturbed=Perturbation(generator))) for _ in range(ENOUGH)]
            limits = limits.maximum(MULTIPLE * torch.stack(runs).nan_to_num(posinf=0).median(0).values)
        wrong.append((int((~(rows <= limits)).sum()), prompt))
    differs = sum(count for count, _ in wrong) > math.ceil(1.5 * chosen)
    if settings.any_rank(differs):
        if not differs:
            raise UnsupportedError(ON_ANOTHER_RANK)
        count, prompt = max(wrong)
        raise UnsupportedError(
            f"self-check failed: the graph that torch.compile traced gives other logits than {name} itself for {count} of the "
            f"{len(truth.prompts[prompt])} tokens of a prompt, off by {worst(errors[prompt]):.2g} of their size (allowed "
            f"{limit:.2g}). What the model computes depends on more than the trace shows: on the length of a call, on its values, "
            "on whether it is given position_ids, or on an attention implementation that computes something else. Nothing was "
            "generated."
        )


def check_rows(prompts: Sequence[Tensor], logits: Sequence[Tensor], takes_rows: bool) -> None:
    """A ragged batch needs the logits of any row; a model that keeps the last one alone would answer for one request only.

    Args:
        takes_rows: the call passes logits_to_keep.
    """
    for prompt, each in zip(prompts, logits, strict=True):
        if each.shape[0] != len(prompt):
            advice = (
                "leave logits_to_keep out, or pass logits_to_keep=batch.logits_rows"
                if takes_rows
                else "its forward must return the logits of every position (or take logits_to_keep), and not of the last one or of the "
                "whole sequence alone"
            )
            raise UnsupportedError(
                f"this call gives logits of {each.shape[0]} rows for {len(prompt)} tokens, but a ragged batch needs those of "
                f"any row; {advice}"
            )


def _as_it_is(name: str, value: Tensor) -> Tensor:
    return value
