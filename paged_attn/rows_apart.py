"""A row's position must not matter to earlier rows: in a paged batch those belong to other requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.model_facts import text_config
from paged_attn.ragged_probe import relative_error

PROBE_ROWS = 24
ROUNDING = 2e-3  # of the logits' size; a rotary embedding that follows the call moves them by percents
ORIGINAL = "original_max_position_embeddings"


def probe_rows(device: torch.device, longest: int | None) -> tuple[Tensor, Tensor]:
    """Token ids and positions 0, 1, ... [T], int64, within the model's positions."""
    positions = torch.arange(min(PROBE_ROWS, longest or PROBE_ROWS), device=device)
    return positions % 5 + 1, positions


def check_rows_apart(logits: Callable[[Tensor, Tensor], Tensor], ids: Tensor, longest: int | None, model: nn.Module | None) -> None:
    """Move the last row of a short call to the model's last position, and compare the rows before it.

    Some rotary embeddings take other frequencies for a whole call once its largest position is beyond some length, which no short probe
    shows. Three calls, and a fourth for the message.

    Args:
        logits: of token ids and positions [T] -> [T, vocabulary], one causal sequence.
        ids: [T] int64, the probe.
        longest: how many positions the model has; where it states none there is nothing to choose by.
        model: for the message.

    Raises:
        UnsupportedError: earlier logits move by more than the model's own rounding.
    """
    last = len(ids) - 1
    if longest is None or longest - 1 < last + 2:
        return
    positions = torch.arange(len(ids), device=ids.device)

    def before_it(position: int) -> Tensor:
        return logits(ids, torch.cat([positions[:-1], positions.new_full((1,), position)]))[:-1]

    far = before_it(longest - 1)
    # After it: some models keep what they last computed, and this leaves them with what is for short calls.
    near, next_to_it = before_it(last + 1), before_it(last + 2)
    error, limit = relative_error(near, far), ROUNDING + 4 * relative_error(near, next_to_it)
    if not error <= limit:
        original = _original_positions(model)
        stays = original is not None and last + 2 < original < longest and relative_error(near, before_it(original - 1)) <= limit
        raise UnsupportedError(
            f"a token at position {longest - 1} moves the logits of the rows before it in {_name(model)} by {error:.2g} of their size "
            f"(allowed {limit:.2g}): a long request would change what others of its batch get. Models whose rotary embedding follows the "
            f"length of the call (longrope) do so; with max_position_embeddings at most the length up to which it stays the same, they "
            "can be served." + (_way_out(model, original) if stays else "")
        )


def _original_positions(model: nn.Module | None) -> int | None:
    """How many positions the model had before its rotary embedding was stretched, as its config says; the least of several."""
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [each for each in rope.values() if isinstance(each, dict)]
    found = [getattr(config, ORIGINAL, None), *(each.get(ORIGINAL) for each in (rope, *by_layer))]
    return min((count for count in found if isinstance(count, int)), default=None)


def _way_out(model: nn.Module | None, positions: int | None) -> str:
    """Set on the loaded model: a checkpoint's own config also has other numbers made from it (the attention's scale)."""
    config = "model.config" if text_config(model) is getattr(model, "config", None) else "model.config.get_text_config()"
    return f" Here that is {positions}: set {config}.max_position_embeddings = {positions} on the loaded model before it is given to us."


def _name(model: nn.Module | None) -> str:
    return "the model" if model is None else type(model).__name__
