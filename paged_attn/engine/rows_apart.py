"""A row's position must not matter to earlier rows: in a paged batch those belong to other requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.ragged_probe import relative_error

PROBE_ROWS = 24
ROUNDING = 2e-3  # of the logits' size; a rotary embedding that follows the call moves them by percents


def probe_rows(device: torch.device, longest: int | None) -> tuple[Tensor, Tensor]:
    """Token ids and positions 0, 1, ... [T], int64, within the model's positions."""
    positions = torch.arange(min(PROBE_ROWS, longest or PROBE_ROWS), device=device)
    return positions % 5 + 1, positions


def check_rows_apart(logits: Callable[[Tensor, Tensor], Tensor], device: torch.device, longest: int | None, name: str) -> None:
    """Move the last row of a short call to the model's last position, and compare the rows before it.

    Some rotary embeddings take other frequencies for a whole call once its largest position is beyond some length, which no short probe
    shows.

    Args:
        logits: of token ids and positions [T] -> [T, vocabulary], one causal sequence.
        longest: how many positions the model has; where it states none there is nothing to choose by.
        name: of the model, for the message.

    Raises:
        UnsupportedError: earlier logits move by more than the model's own rounding.
    """
    ids, positions = probe_rows(device, longest)
    last = len(positions) - 1
    if longest is None or longest - 1 < last + 2:
        return

    def before_it(position: int) -> Tensor:
        return logits(ids, torch.cat([positions[:-1], positions.new_full((1,), position)]))[:-1]

    far = before_it(longest - 1)
    # After it: some models keep what they last computed, and this leaves them with what is for short calls.
    near, next_to_it = before_it(last + 1), before_it(last + 2)
    error, limit = relative_error(near, far), ROUNDING + 4 * relative_error(near, next_to_it)
    if not error <= limit:
        raise UnsupportedError(
            f"a token at position {longest - 1} moves the logits of the rows before it in {name} by {error:.2g} of their size (allowed "
            f"{limit:.2g}): a long request would change what others of its batch get. Models whose rotary embedding follows the length of "
            "the call (longrope) do so; with max_position_embeddings at most the length up to which it stays the same, they can be served."
        )
