"""Whether a model, unmodified, gives a token the same logits whatever comes after it: one that does not cannot be served in batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import MODEL_ERRORS
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.calling.call_signature import takes
from paged_attn.calling.evaluating import as_served
from paged_attn.engine.model.rows_of_logits import rows_of_logits
from paged_attn.passes.fx.model_facts import max_positions, model_device, model_dtype
from paged_attn.tolerances import LOGITS, LOGITS_16_BIT, row_errors, typical

SEEDS, MORE, MOST_MORE = 3, 24, 256  # tokens behind the first row that is compared
OF_ALL_TOKENS = (
    "something is computed from all tokens of a call at once, such as a factor made of their number, or the scale of numbers that are "
    "quantised as it runs"
)
OF_CHOICES = "of more than {0} keys, which {0} a query takes changes with the number of tokens, as among equal scores"


def refuse_both_directions(layers: Sequence[AttentionSpec]) -> None:
    """Raises UnsupportedError for layers that attend in both directions."""
    if acausal := [spec.module for spec in layers if not spec.causal]:
        raise UnsupportedError(
            f"{acausal[0] or 'the model'} attends in both directions, so that a later token would change earlier ones: "
            "this model cannot generate token by token"
        )


def refuse_acausal(model: nn.Module, start: int, num_ids: int, because: str) -> None:
    """Compare calls of many tokens with calls of the first of them.

    Args:
        start: the first row that is compared; where a model has no positions for that many there is nothing to compare.
        num_ids: token ids are drawn below that.
        because: for the message: what may do it.

    Raises:
        UnsupportedError: later tokens move most of the earlier rows of logits by more than rounding does; a few rows may move where a
            quantiser or a router is between two steps.
    """
    total = start + max(MORE, min(start, MOST_MORE))
    total = min(total, max_positions(model) or total)
    ends = sorted({end for end in (start + (total - start) // 3, start + 2 * (total - start) // 3, total - 1) if start < end < total})
    more = {"use_cache": False} if takes(model, "use_cache") else {}
    with as_served(model):
        for seed in range(SEEDS if ends else 0):
            ids = torch.randint(0, num_ids, (total,), generator=torch.Generator().manual_seed(seed)).to(model_device(model))
            try:
                whole = rows_of_logits(model, ids, **more)
            except torch.OutOfMemoryError:
                raise
            except MODEL_ERRORS:  # of the model's own code: it has no more positions
                return
            limit = LOGITS.get(model_dtype(model), LOGITS_16_BIT)
            for end in ends:
                error = typical(row_errors(whole[start:end], rows_of_logits(model, ids[:end], **more)[start:]))
                if not error <= limit:
                    raise UnsupportedError(
                        f"{type(model).__name__} itself is not causal: in a call of {total} tokens its logits of tokens {start} to "
                        f"{end - 1} are others than in a call of the first {end} alone, by {error:.2g} of their size (allowed "
                        f"{limit:g}): {because}. What it says of a token depends on how many come after it, so that no cache and no "
                        "batch gives its answers. Nothing was generated."
                    )
