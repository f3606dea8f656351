"""Says that a model itself leaves the range of its numbers, before a comparison with it blames what is served, or a later token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.check.runs.served import Original
from paged_attn.check.runs.truth import Truth


@contextmanager
def naming_overflow(original: Original, truth: Truth, name: str) -> Iterator[None]:
    """Inside, a refusal says first where the model's own numbers are infinite or NaN, if they are: nothing equals those, and one such
    token's values become NaN in every row that weighs them with zero.

    Args:
        name: the model's, for the message.

    Raises:
        UnsupportedError: the one that was raised inside, with these words or without.
    """
    try:
        yield
    except UnsupportedError as refusal:
        if (where := truth.first_infinite) is None:
            raise
        dtype = str(original.narrow).removeprefix("torch.")
        advice = ", or load the model in bfloat16, which has the range of float32" if original.narrow == torch.float16 else ""
        raise UnsupportedError(
            f"{name} itself gives numbers that are infinite or NaN in {original.module_of(where)} for a random prompt (the largest of "
            f"{dtype} is {torch.finfo(original.narrow).max:.3g}); look at its weights{advice}. What was seen first: {refusal}"
        ) from refusal
