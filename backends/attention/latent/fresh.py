"""New prompts, which have nothing in the pool yet: keys and values of several are expanded by one product, and attended to by one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.batch.host_copy import copy_to_device
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.latent import LatentCall
from paged_attn.backends.attention.latent import expanded

MOST_FILLED = 0.25  # of the tokens of the longest prompt, that a shorter one beside it may be filled up with


@dataclass(frozen=True)
class FreshPrompts:
    """Prompts of like lengths side by side, each filled up to the longest. No token sees what fills up: it lies behind all of them.

    Attributes:
        rows: [prompts, longest] int64, of the step; a prompt is filled up with its own first row.
        real: [tokens] int64, which of all prompts * longest are not filled up; None: all are real.
    """

    rows: Tensor
    real: Tensor | None

    @classmethod
    def of(cls, parts: Sequence[slice], device: torch.device) -> FreshPrompts:
        """The prompts in these rows of a step."""
        starts = np.array([[part.start] for part in parts])
        lengths = np.array([[part.stop - part.start] for part in parts])
        columns = np.arange(lengths.max())
        real = columns < lengths
        rows = copy_to_device(starts + np.where(real, columns, 0), device)
        return cls(rows, None if real.all() else copy_to_device(np.flatnonzero(real), device))

    def attend(self, call: LatentCall, pool: KVPool, batch: Batch) -> None:
        """Write the prompts' rows of `call.output`; their rows of this step are in the pool already."""
        spec, at = call.spec, self.rows.flatten()
        keys, values = (
            each.view(spec.num_q_heads, *self.rows.shape, -1).transpose(0, 1)
            for each in expanded.keys_and_values(call, pool, batch.slots[at])
        )
        query = call.query[self.rows].transpose(1, 2)  # [prompts, heads, longest, dim]
        result = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=spec.scale).transpose(1, 2).flatten(0, 1)
        if self.real is not None:
            at, result = at[self.real], result[self.real]
        call.output[at] = result


def of_like_lengths(parts: Sequence[slice], most_tokens: int) -> Iterator[list[slice]]:
    """Groups of new prompts that run together: at most so many tokens when filled up, and little to fill up."""
    group: list[slice] = []
    longest = 0
    for part in sorted(parts, key=lambda each: each.start - each.stop):  # the longest first
        length = part.stop - part.start
        if group and (longest * (len(group) + 1) > most_tokens or longest - length > MOST_FILLED * longest):
            yield group
            group = []
        if not group:
            longest = length
        group.append(part)
    if group:
        yield group
