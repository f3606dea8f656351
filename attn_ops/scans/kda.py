"""The gated delta rule with a separate decay for each channel of the keys: S = diag(exp(g)) S, then as in `gated_delta.py`, which has the
step.

The share of token j's contribution to a channel that is left at token i is exp(G[i] - G[j]), with G the sums of g. Split into exp(G[i]) and
exp(-G[j]) it overflows where decays are strong. So a chunk is cut once more, into parts: between two parts both factors are relative to the
last sum before the later one, so neither grows; inside a part the difference is taken first, one column of all parts at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.scans.chunks import scan_chunks
from paged_attn.attn_ops.scans.gated_delta import CHUNK, prepared
from paged_attn.attn_ops.scans.state_rows import Extends

PART = 16


def kda_extend(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, output: Tensor, normalise: bool, states: Tensor, extends: Extends
) -> None:
    """query, key [T, key heads, K]; value, output [T, H, V]; g [T, H, K]; beta [T, H]; states [slots, H, K, V]."""
    chunks = extends.chunks(CHUNK)
    q, k, v, decay, learned = (chunks.gather(each) for each in (query, key, value, g, beta[..., None]))
    q, k = prepared(q, k, value.shape[1], normalise)
    total = decay.cumsum(-2)  # [N, H, size, K]; padding does not decay
    scores, pairs = scores_by_channel((q, k), k, total)
    right = torch.cat([v * learned, k * learned * total.exp()], -1)
    solved = torch.linalg.solve_triangular(pairs * learned, right, upper=False, unitriangular=True)  # does not read the diagonal
    new, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    last = total[..., -1:, :]
    result, kept = scan_chunks(
        chunks, extends.before(states), q * total.exp(), k * (last - total).exp(), new, scores, last.exp().transpose(-1, -2), reads
    )
    chunks.scatter(result.transpose(1, 2), output)
    states[extends.targets] = kept


def scores_by_channel(lefts: tuple[Tensor, ...], right: Tensor, total: Tensor) -> list[Tensor]:
    """For each left [N, H, i, j]: the sum over channels of left[i] right[j] exp(total[i] - total[j]), zero if j is later.

    All arguments are [N, H, size, K].
    """
    size = right.shape[-2]
    before = torch.cat([torch.zeros_like(total[..., :1, :]), total[..., PART - 1 : -1 : PART, :]], -2)[..., None, :]
    sums, *parts = (each.unflatten(-2, (size // PART, PART)) for each in (total, right, *lefts))  # [N, H, parts, PART, K]
    earlier = torch.arange(size, device=right.device) < torch.arange(0, size, PART, device=right.device)[:, None]
    # [N, H, parts, size, K]: what is left of each token when a part begins; zero for tokens of that part or later.
    kept = right[..., None, :, :] * (before - total[..., None, :, :]).masked_fill(~earlier[..., None], float("-inf")).exp()
    later = torch.arange(PART, device=right.device)
    found = []
    for left in parts[1:]:
        scores = (left * (sums - before).exp()) @ kept.transpose(-1, -2)  # [N, H, parts, PART, size]
        found.append(scores.view(*scores.shape[:-1], size // PART, PART))
    for column in range(PART):
        left_of_it = (sums - sums[..., column : column + 1, :]).masked_fill((later < column)[:, None], float("-inf")).exp()
        left_of_it = left_of_it * parts[0][..., column : column + 1, :]
        for scores, left in zip(found, parts[1:], strict=True):
            scores.diagonal(dim1=2, dim2=4)[..., column, :] = (left * left_of_it).sum(-1).transpose(-1, -2)
    return [scores.flatten(-2).flatten(2, 3) for scores in found]
