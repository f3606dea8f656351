"""Allowed tokens, for requests that restrict them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import PackedInts


def allow_only(scores: Tensor, allowed: Mapping[int, Sequence[int]]) -> None:
    """scores [N, V] float32, in place: -inf for all but these tokens in some rows. Ids past the vocabulary allow nothing. Nothing waits for
    the device."""
    vocabulary = scores.shape[-1]
    rows = [[row * vocabulary + token for token in tokens if token < vocabulary] for row, tokens in allowed.items()]
    packed = PackedInts((len(rows), sum(map(len, rows))), (), scores.device)
    packed.host[0][:] = list(allowed)
    packed.host[1][:] = np.fromiter((element for row in rows for element in row), np.int64)
    of_rows, elements = packed.to_device()
    flat = scores.view(-1)
    kept = flat.index_select(0, elements)
    scores.index_fill_(0, of_rows, -torch.inf)
    flat.index_copy_(0, elements, kept)
