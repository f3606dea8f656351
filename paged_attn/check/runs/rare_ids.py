"""Token ids that a model treats otherwise than nearly all others, by a table of its own: random prompts would miss them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

MOST = 8
NARROW = 8  # numbers a token; a wider table tells every id from the others
USUAL = 0.9  # of the rows are equal, where the others are rare
FEWEST = 32  # ids; smaller tables are drawn whole


def rare_ids(tables: Iterable[Tensor], num_ids: int) -> list[int]:
    """Ids whose row in some table [ids, few numbers] is none that most ids have, at most `MOST` of them."""
    found: dict[int, None] = {}
    for table in tables:
        if table.dim() == 0 or not FEWEST <= num_ids <= table.shape[0] or table.numel() > NARROW * table.shape[0] or table.is_complex():
            continue
        rows = table.detach()[:num_ids].reshape(num_ids, -1)
        rows = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
        _, which, counts = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
        if counts.max() >= USUAL * num_ids and len(counts) > 1:
            others = (which != counts.argmax()).nonzero().flatten()
            found.update(dict.fromkeys(others[:: max(len(others) // MOST, 1)].tolist()))
    return list(found)[:MOST]


def with_rare_ids(prompts: Sequence[Tensor], rare: Sequence[int]) -> list[Tensor]:
    """The prompts with such ids in them: first in a prompt, first in its second half, and on the way."""
    if not rare:
        return list(prompts)
    changed = [prompt.clone() for prompt in prompts]
    for number, prompt in enumerate(changed):
        at = sorted({0, max(len(prompt) // 2 - 1, 0), *range(2, len(prompt), 4)} if number else {0})
        prompt[at] = torch.tensor([rare[(number + i) % len(rare)] for i in range(len(at))], device=prompt.device)
    return changed
