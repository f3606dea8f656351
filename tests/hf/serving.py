"""What a user of `paged_attn.patch` writes: prompts that decode together, with pages dealt out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paged_attn import Batch, BatchRequest, KVPool, forward_context
from paged_attn.attn_ops.specs.attention import AttentionSpec


def served_by_hand(model: nn.Module, layers: Sequence[AttentionSpec], prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy tokens of a patched model, by a loop that cuts nothing up: each step takes what each prompt has in cache not yet."""
    pool = KVPool(layers, 1 + 8 * len(prompts), 8, torch.float32)
    pool.storage.fill_(float("nan"))
    tokens, cached = [list(p) for p in prompts], [0] * len(prompts)
    for _ in range(new_tokens):
        requests = [BatchRequest(t[c:], range(1 + 8 * i, 9 + 8 * i), c) for i, (t, c) in enumerate(zip(tokens, cached, strict=True))]
        batch = Batch.build(requests, 8)
        with torch.no_grad(), forward_context(batch, pool):
            logits = model(**batch.model_inputs()).logits[0]
        for i, token in enumerate(logits[batch.logits_rows[: batch.num_logits]].argmax(-1).tolist()):
            cached[i] = len(tokens[i])
            tokens[i].append(token)
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]
