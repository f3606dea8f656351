"""Compares the traced graph with the model itself, called as its users call it: torch.compile must have seen what they get."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.check.compare.suspects import ENOUGH, TRIES, UNITS
from paged_attn.check.runs.choices import Choices, Perturbation, same_choices
from paged_attn.check.runs.served import HowToRun, Original
from paged_attn.check.runs.steps import ProbeSettings
from paged_attn.check.runs.tapped import unchanged
from paged_attn.check.runs.truth import Truth
from paged_attn.tolerances import MULTIPLE, rounding, row_errors, typical, worst

Logits = Callable[[Tensor], Tensor]


def check_against_model(model: Logits, original: Original, truth: Truth, name: str, settings: ProbeSettings) -> None:
    """Compares the logits of every probe prompt.

    They are mostly equal bit for bit. Otherwise (another kernel, a sum in no fixed order), rounding adds up over the layers, more in some
    rows than in others. The allowed error is then measured on the graph itself: in wider numbers and, for rows that are off by more than
    most, with all numbers perturbed.

    Args:
        model: prompt [T] -> logits [T, vocabulary].
        name: the model's, for messages.

    Raises:
        UnsupportedError: they differ by more.
    """
    pairs = [(model(prompt), logits) for prompt, logits in zip(truth.prompts, truth.logits, strict=True)]
    bad = [int((expected.isnan() | (expected == torch.inf)).any(-1).sum()) for expected, _ in pairs]
    if settings.fails(sum(bad) > 0):
        count, prompt = max((count, prompt) for prompt, count in enumerate(bad))
        raise UnsupportedError(
            f"{name} itself gives logits that are infinite or NaN for {count} of the {len(truth.prompts[prompt])} tokens of a "
            "random prompt; look at its weights, its dtype and its attn_implementation. Nothing was generated."
        )
    check_rows(truth.prompts, [expected for expected, _ in pairs], False)
    if not settings.any_rank(not all(expected.dtype == got.dtype and torch.equal(expected, got) for expected, got in pairs)):
        return

    wide = [original.run(prompt, unchanged, HowToRun(wide=True)) for prompt in truth.prompts]
    by_rounding = [row_errors(got, run) for (_, got), run in zip(pairs, wide, strict=True)]
    level = max(typical(torch.cat(by_rounding)), rounding(original.narrow, truth.logits[0].dtype))
    limit = MULTIPLE * level
    chosen = sum(int((rows > limit).sum()) for rows in by_rounding)  # rows in which rounding changed a router's choice
    wrong = [(_unexplained(*pair, original, truth, prompt, limit, settings), prompt) for prompt, pair in enumerate(pairs)]
    if settings.fails(sum(count for count, _ in wrong) > math.ceil(1.5 * chosen)):
        count, prompt = max(wrong)
        raise UnsupportedError(
            f"self-check failed: the graph that torch.compile traced gives other logits than {name} itself for {count} of the "
            f"{len(truth.prompts[prompt])} tokens of a prompt, off by {worst(row_errors(*pairs[prompt])):.2g} of their size (allowed "
            f"{limit:.2g}). What the model computes depends on more than the trace shows: on the length of a call, on its values, "
            "on whether it is given position_ids, or on an attention implementation that computes something else. Nothing was "
            "generated."
        )


def _unexplained(
    expected: Tensor, got: Tensor, original: Original, truth: Truth, prompt: int, limit: float, settings: ProbeSettings
) -> int:
    """How many rows of the model's logits `expected` differ from the graph's logits `got` by more than rounding explains. A row is
    explained if it is off by no more than `limit` or rounding's usual effect, or equals the graph's with the choices of a perturbed run."""
    tokens = truth.prompts[prompt]
    generator = torch.Generator(tokens.device).manual_seed(prompt)
    errors, moved = row_errors(expected, got), list[Tensor]()
    wrong = ~(errors <= limit)
    chosen: Choices = {}
    for attempt in range(TRIES):
        if not settings.any_rank(bool(wrong.any())):
            break
        perturbed = Perturbation(generator, 1.0 if attempt < ENOUGH else UNITS[attempt % len(UNITS)])
        near = original.run(tokens, unchanged, HowToRun(perturbed=perturbed))
        wrong &= ~(row_errors(expected, near) <= limit)
        if attempt < ENOUGH:
            moved.append(row_errors(got, near).nan_to_num(posinf=0))
        if len(moved) == ENOUGH:
            wrong &= ~(errors <= MULTIPLE * torch.stack(moved).median(0).values)
        if settings.any_rank(not same_choices(chosen, perturbed.choices)):
            chosen = perturbed.choices
            wrong &= ~(row_errors(expected, original.run(tokens, unchanged, HowToRun(choices=chosen))) <= limit)
        if len(moved) == ENOUGH and not settings.any_rank(bool(chosen)):
            break  # only other choices could explain more
    return int(wrong.sum())


def check_rows(prompts: Sequence[Tensor], logits: Sequence[Tensor], takes_rows: bool) -> None:
    """Checks that there are logits for every row, as a ragged batch needs: a model that keeps only the last serves one request only.
    `takes_rows`: the call passes logits_to_keep."""
    for prompt, each in zip(prompts, logits, strict=True):
        if each.shape[0] != len(prompt):
            advice = (
                "leave logits_to_keep out, or pass logits_to_keep=batch.logits_rows"
                if takes_rows
                else "its forward must return the logits of every position (or take logits_to_keep), not only of the last one or of the "
                "whole sequence"
            )
            raise UnsupportedError(
                f"this call gives logits of {each.shape[0]} rows for {len(prompt)} tokens, but a ragged batch needs those of "
                f"any row; {advice}"
            )
