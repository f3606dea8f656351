"""Routing in one launch: a program for each token. `Routing` in attn_ops/specs/routing.py computes the same in PyTorch."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)  # lowest finite float32


@triton.jit
def route_kernel(
    logits, bias, weights, ids, row_stride, hidden, eps, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, SCORE: tl.constexpr, AFTER: tl.constexpr, RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROUNDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """weights, ids [T, k] of logits [T, E]; G, S: number and size of groups, rounded up to powers of 2. The first of equals is chosen."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = EXPERTS // GROUPS
    group, within = tl.arange(0, G), tl.arange(0, S)
    expert = group[:, None] * size + within[None, :]
    real = (group < GROUPS)[:, None] & (within < size)[None, :]
    score = tl.load(logits + token * row_stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    if SCORE == "softmax":
        score = tl.exp(score - tl.max(tl.max(score, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    elif SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-score))
    if ROUNDED:
        score = score.to(logits.dtype.element_ty).to(tl.float32)
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
        if ROUNDED and bias.dtype.element_ty == logits.dtype.element_ty:
            choice = choice.to(logits.dtype.element_ty).to(tl.float32)
    choice = tl.where(real, choice, float("-inf"))
    if GROUPS > 1:
        worth = tl.zeros([G], tl.float32)
        rest = choice
        for _ in tl.static_range(GROUP_BEST):
            best, at = tl.max(rest, 1, return_indices=True)
            worth += best
            rest = tl.where(within[None, :] == at[:, None], float("-inf"), rest)
        worth = tl.where(group < GROUPS, worth, float("-inf"))
        taken = tl.zeros([G], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            best_group = tl.argmax(worth, 0)
            taken = tl.where(group == best_group, 1, taken)
            worth = tl.where(group == best_group, float("-inf"), worth)
        choice = tl.where(real & (taken == 0)[:, None], hidden, choice)
    finite = tl.maximum(choice, LOWEST, propagate_nan=tl.PropagateNan.ALL)  # chosen scores become -inf, below all remaining ones
    choice = tl.where(real, finite, float("-inf"))
    flat, scores = tl.reshape(choice, [G * S]), tl.reshape(score, [G * S])
    every = tl.arange(0, G * S)
    k = tl.arange(0, K)
    chosen, weight = tl.zeros([K], tl.int32), tl.zeros([K], tl.float32)
    for j in tl.static_range(TOP_K):
        at = tl.argmax(flat, 0)
        chosen = tl.where(k == j, at, chosen)
        weight = tl.where(k == j, tl.sum(tl.where(every == at, scores, 0.0), 0), weight)
        flat = tl.where(every == at, float("-inf"), flat)
    own = k < TOP_K
    if AFTER == "softmax":
        weight = tl.where(own, tl.exp(weight - tl.max(tl.where(own, weight, float("-inf")), 0)), 0.0)
        weight = weight / tl.sum(weight, 0)
    elif AFTER == "sigmoid":
        weight = 1.0 / (1.0 + tl.exp(-weight))
    if RENORMALISE:
        weight = weight / (tl.sum(tl.where(own, weight, 0.0), 0) + eps)
    # A row of only NaN gets some valid expert.
    chosen = tl.minimum(chosen // S * size + tl.minimum(chosen % S, size - 1), EXPERTS - 1)
    tl.store(weights + token * TOP_K + k, (weight * scale).to(weights.dtype.element_ty), mask=own)
    tl.store(ids + token * TOP_K + k, chosen.to(ids.dtype.element_ty), mask=own)
