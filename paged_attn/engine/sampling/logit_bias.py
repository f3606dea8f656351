"""What requests add to the logits of single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import PackedInts


def add_biases(scores: Tensor, biases: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Add to scores [N, V] float32, in place, for each row its (token, bias) pairs; each token once in a row.

    Raises:
        ValueError: a token that the vocabulary does not have.
    """
    sizes = [len(each) for each in biases]
    total = sum(sizes)
    if not total:
        return
    pairs = [pair for each in biases for pair in each]
    if wrong := [token for token, _ in pairs if token >= scores.shape[-1]]:
        raise ValueError(f"logit_bias: got token id {wrong[0]}; allowed: 0 to {scores.shape[-1] - 1}, what the model's logits are of")
    packed = PackedInts((total,), (total,), scores.device)
    packed.host[0][:] = np.arange(len(biases)).repeat(sizes) * scores.shape[-1] + [token for token, _ in pairs]
    packed.host[1].view(np.float32)[:] = [bias for _, bias in pairs]
    elements, values = packed.to_device()
    flat = scores.view(-1)
    flat[elements] = flat[elements] + values.view(torch.float32)
