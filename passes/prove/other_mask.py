"""Causal masks that no family describes (every third key, blocks with a few keys for all, the first keys beside a window).

Such an attention can be recomputed from all tokens of a request, including its mask, whatever that is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.fx.mask_literals import HIDES
from paged_attn.passes.prove.mask_probe import MaskProbe
from paged_attn.passes.prove.mask_proof import MOST_BIAS_ELEMENTS
from paged_attn.passes.prove.score_subgraph import Recomputable, zeros_for

LENGTHS = (61, 333, 609)


class OtherMask(Recomputable):
    """A mask of unknown family that is made only from positions and hides all later tokens."""

    what = "a mask of no known family"


def hides_later_tokens(probe: MaskProbe) -> bool:
    """Whether a mask hides all later tokens and does not depend on how many there are, also with its large numbers scaled down.

    False if this cannot be decided, and for masks made from token ids, of which no rows are kept.
    """
    if any(probe.form.roles.get(node) == "input_ids" and node not in probe.shapes for node in probe.nodes):
        return False
    wanted = {*LENGTHS, max(LENGTHS[-1], probe.longest_table)}
    lengths = sorted({min(length, probe.table_length or length, probe.form.max_tokens or length) for length in wanted})
    try:
        if len(_rows_of(probe, lengths[0], None)) * lengths[-1] ** 2 > MOST_BIAS_ELEMENTS:
            return False
        return all(_is_causal([_rows_of(probe, length, scale) for length in lengths]) for scale in (None, *probe.scales))
    except UnsupportedError:
        return False


def _is_causal(masks: list[Tensor]) -> bool:
    """Whether the longest, of which the others are the first rows and columns, hides all that is ahead of a row."""
    longest = masks[-1]
    ahead = torch.ones(longest.shape[1:], dtype=torch.bool, device=longest.device).triu(1)
    beginnings = all(torch.equal(mask, longest[:, : len(mask[0]), : len(mask[0])]) for mask in masks)
    return beginnings and bool((longest[:, ahead] <= HIDES).all())


def _rows_of(probe: MaskProbe, length: int, scale: Sequence[int] | None) -> Tensor:
    """What a mask adds, [heads, T, T], clamped to HIDES."""
    given = {} if probe.products is None else {probe.products: zeros_for(probe.products, probe.form, length, torch.float64)}
    mask = probe.evaluate((length,), scale, 0, given)
    if probe.products is not None:
        mask = mask[..., probe.first_column : probe.first_column + length]
    if any(size not in (1, length) for size in mask.shape[-2:]):
        raise UnsupportedError(f"{probe.where}: its mask has shape {list(mask.shape)}")
    mask = torch.where(mask, 0.0, HIDES) if mask.dtype == torch.bool else mask.double().nan_to_num(neginf=HIDES).clamp(min=HIDES)
    return mask.expand(*mask.shape[:-2], length, length).reshape(-1, length, length)
