"""A padded batch of transformers as prompts without padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError


def prompt_rows(input_ids: Tensor, given: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
    """Each row's tokens without its padding, and how many tokens of padding it had on its left.

    Args:
        input_ids: [B, L] int64.
        given: the other inputs of the model: attention_mask [B, L] or None, position_ids or None.

    Raises:
        UnsupportedError: padding elsewhere than on the left, a row of padding alone, or positions that do not count on from 0.
    """
    mask = given.get("attention_mask")
    real = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device).long()
    if real.shape != input_ids.shape or not bool(((real == 0) | (real == 1)).all()):
        raise UnsupportedError(
            f"attention_mask has the shape {list(real.shape)} or other numbers than 0 and 1; paged_attn.generate takes one of 0 and 1 and "
            f"of the shape of input_ids, {list(input_ids.shape)}. generate(..., past_key_values=paged_attn.PagedCache(model)) takes any."
        )
    lengths = real.sum(1)
    if bool((real.diff(dim=1) < 0).any()) or bool((lengths == 0).any()):
        raise UnsupportedError(
            "attention_mask has a 0 behind a 1, or a row of zeros alone: paged_attn.generate takes prompts with their padding on the left "
            "(tokenizer.padding_side = 'left'), as transformers' generate wants them"
        )
    positions = given.get("position_ids")
    if positions is not None and not bool(((positions.to(input_ids.device) == real.cumsum(1) - 1) | (real == 0)).all()):
        raise UnsupportedError(
            "position_ids other than 0, 1, 2, ... of each prompt: an engine counts positions itself. Leave them out, or run "
            "generate(..., past_key_values=paged_attn.PagedCache(model))"
        )
    rows = [row[-length:] for row, length in zip(input_ids.tolist(), lengths.tolist(), strict=True)]
    return rows, (input_ids.shape[1] - lengths).tolist()
