"""Routing in one launch: a program for each token. `Routing` in attn_ops/specs/routing.py computes the same in PyTorch."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)  # lowest finite float32
LEAST = tl.constexpr(-(1 << 63))  # of 64 bits


@triton.jit
def _scored(logit, most, total, SCORE: tl.constexpr, ROUNDED: tl.constexpr, DTYPE: tl.constexpr):
    """Scores of logits; `most` and `total` are those of the softmax."""
    if SCORE == "softmax":
        logit = tl.exp(logit - most) / total
    elif SCORE == "sigmoid":
        logit = 1.0 / (1.0 + tl.exp(-logit))
    return logit.to(DTYPE).to(tl.float32) if ROUNDED else logit


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
    most = tl.max(tl.max(score, 1), 0) if SCORE == "softmax" else 0.0
    total = tl.sum(tl.sum(tl.exp(score - most), 1), 0) if SCORE == "softmax" else 1.0
    score = _scored(score, most, total, SCORE, ROUNDED, logits.dtype.element_ty)
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
        worth = tl.maximum(worth, LOWEST, propagate_nan=tl.PropagateNan.ALL)  # -inf is of groups that were taken
        worth = tl.where(group < GROUPS, worth, float("-inf"))
        taken = tl.zeros([G], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            best_group = tl.argmax(worth, 0)
            taken = tl.where(group == best_group, 1, taken)
            worth = tl.where(group == best_group, float("-inf"), worth)
        choice = tl.where(real & (taken == 0)[:, None], hidden, choice)
    # One number holds a choice and, below it, its place from the end: the largest is the first of the largest choices.
    bits = (choice + 0.0).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    every = group[:, None] * S + within[None, :]
    keys = tl.reshape(tl.where(real, (ordered << 32) + (G * S - every), LEAST), [G * S])
    k = tl.arange(0, K)
    chosen = tl.zeros([K], tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        chosen = tl.where(k == j, G * S - (best & 0x7FFFFFFF).to(tl.int32), chosen)
        keys = tl.where(keys == best, LEAST, keys)
    chosen = tl.minimum(chosen // S * size + tl.minimum(chosen % S, size - 1), EXPERTS - 1)
    own = k < TOP_K
    weight = tl.load(logits + token * row_stride + chosen, mask=own, other=0.0).to(tl.float32)
    weight = _scored(weight, most, total, SCORE, ROUNDED, logits.dtype.element_ty)
    if AFTER == "softmax":
        weight = tl.where(own, tl.exp(weight - tl.max(tl.where(own, weight, float("-inf")), 0)), 0.0)
        weight = weight / tl.sum(weight, 0)
    elif AFTER == "sigmoid":
        weight = 1.0 / (1.0 + tl.exp(-weight))
    if RENORMALISE:
        weight = weight / (tl.sum(tl.where(own, weight, 0.0), 0) + eps)
    tl.store(weights + token * TOP_K + k, (weight * scale).to(weights.dtype.element_ty), mask=own)
    tl.store(ids + token * TOP_K + k, chosen.to(ids.dtype.element_ty), mask=own)
