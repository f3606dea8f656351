"""Checks that a row's position does not affect other rows: in a paged batch those belong to other requests.

Some rotary embeddings take other frequencies for a whole call once its largest position is beyond some length, which no short prompt shows.
So all that lies between the attentions runs twice on a few rows and one behind them: next to them, and at the model's last position. All
rows but that one must come out the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import without_attention
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.check.runs.boundaries import Boundary
from paged_attn.check.runs.served import Seen, Served, must_run
from paged_attn.check.runs.steps import SHORTEST  # frequencies may change at any length
from paged_attn.check.runs.truth import Truth
from paged_attn.passes.fx.model_facts import text_config
from paged_attn.tolerances import MULTIPLE, rounding, row_errors, worst

ORIGINAL = "original_max_position_embeddings"


def check_long_positions(served: Served, truth: Truth, longest: int | None, model: nn.Module | None) -> None:
    """Checks this, as described above.

    Args:
        longest: the model's number of positions; None: there is no position to test.
        model: for the message.

    Raises:
        UnsupportedError: other rows move by more than rounding.
    """
    count = len(truth.prompts[SHORTEST])
    if longest is None or longest <= count + 1:
        return
    near = _seen(served, truth, count)
    moved = _first_move(served, near, _seen(served, truth, longest - 1), count)
    if not served.settings.fails(moved is not None):
        return
    assert moved is not None
    module, error, limit = moved
    first = _original_positions(model) if served.settings.ranks is None else None  # finding out more would need the other ranks
    stays = first is not None and count < first < longest and _first_move(served, near, _seen(served, truth, first - 1), count) is None
    raise UnsupportedError(
        f"self-check failed: a token at position {longest - 1} moves other tokens of its batch in {module} by {error:.2g} of their size "
        f"(allowed {limit:.2g}): a long request would change what others get. Models whose rotary embedding follows the length of the "
        "call (longrope) do so; with max_position_embeddings at most the length up to which it stays the same, they can be served."
        + (_way_out(model, first) if stays else "")
    )


def _seen(served: Served, truth: Truth, position: int) -> Mapping[Any, Seen]:
    """The values computed for the shortest prompt and one more row, of another request, at this position."""
    prompt = truth.prompts[SHORTEST]
    count, page_size = len(prompt), position + 1  # so one page is enough
    requests = [
        BatchRequest(prompt.tolist(), [1] * -(-count // page_size), 0, count, 1),
        BatchRequest(prompt[:1].tolist(), [1], position, 1, 2),
    ]
    batch = Batch.build(requests, page_size, prompt.device)

    def visit(boundary: Boundary, value: Tensor) -> Tensor:
        name = boundary.original
        if name not in truth.names:
            return value
        copied = value.clone()
        rows = copied if boundary.is_of_op else truth.rows_of(name, copied)
        rows[:count] = truth.served(SHORTEST, name, boundary).reshape(rows[:count].shape).to(value.dtype)
        return copied

    with without_attention(batch, served.kv_dtype), must_run("the rewritten graph", f"a token at position {position}"):
        return served.run_pieces(batch, visit)


def _first_move(served: Served, near: Mapping[Any, Seen], far: Mapping[Any, Seen], count: int) -> tuple[str, float, float] | None:
    """The first value in which a row before the last one moved: (module, error, limit)."""
    for key, (module, expected) in near.items():
        got = far[key].value
        axes = [axis for axis, size in enumerate(expected.shape) if size == count + 1]
        if got.shape != expected.shape or not axes:
            continue  # not one row per token
        limit = MULTIPLE * rounding(expected.dtype, served.kv_dtype)
        error = min(worst(row_errors(expected.movedim(axis, 0)[:count], got.movedim(axis, 0)[:count])) for axis in axes)
        if not error <= limit:
            return module, error, limit
    return None


def _original_positions(model: nn.Module | None) -> int | None:
    """According to the config, the number of positions before the rotary embedding was stretched; the smallest of several."""
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [each for each in rope.values() if isinstance(each, dict)]
    found: list[Any] = [getattr(config, ORIGINAL, None), *(each.get(ORIGINAL) for each in (rope, *by_layer))]
    return min((count for count in found if isinstance(count, int)), default=None)


def _way_out(model: nn.Module | None, positions: int | None) -> str:
    """To be set on the loaded model: in a checkpoint's config other numbers depend on it (the attention's scale)."""
    config = "model.config" if text_config(model) is getattr(model, "config", None) else "model.config.get_text_config()"
    return f" Here that is {positions}: set {config}.max_position_embeddings = {positions} on the loaded model before it is given to us."
