"""Allowed tokens, for requests that restrict them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import PackedInts


def allow_only(scores: Tensor, allowed: Mapping[int, NDArray[np.int64]]) -> None:
    """scores [N, V] float32, in place: -inf for all but these tokens in some rows. Ids past the vocabulary allow nothing. Nothing waits for
    the device."""
    vocabulary = scores.shape[-1]
    kept_in = np.concatenate([row * vocabulary + tokens[tokens < vocabulary] for row, tokens in allowed.items()])
    packed = PackedInts((len(allowed), len(kept_in)), (), scores.device)
    packed.host[0][:] = list(allowed)
    packed.host[1][:] = kept_in
    of_rows, elements = packed.to_device()
    flat = scores.view(-1)
    kept = flat.index_select(0, elements)
    scores.index_fill_(0, of_rows, -torch.inf)
    flat.index_copy_(0, elements, kept)
