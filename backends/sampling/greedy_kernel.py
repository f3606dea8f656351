"""Encodes a logit and its token as one number whose maximum gives the most likely token, the first among equals."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

NAN_KEY = tl.constexpr(0x7FFFFFFF)
INF_KEY = tl.constexpr(0x7F800000)  # keys from this up, and from its negative down, are not finite
LEAST_KEY = tl.constexpr(-(2**31))
LEAST = tl.constexpr(-(2**63))


@triton.jit
def best_of_part(logits, keys, vocabulary, stride, parts, PART: tl.constexpr, EARLY: tl.constexpr):
    """logits [N, vocabulary] -> keys [N, parts] int64; grid (N, parts)."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    there = token < vocabulary
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=there, other=float("-inf")).to(tl.float32) + 0.0  # no -0.0
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # in the order of the numbers
    key = tl.where(x != x, NAN_KEY, key)
    key = tl.where(there, key, LEAST_KEY)
    tl.store(keys + row * parts + part, tl.max((key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64), 0))


@triton.jit
def best_of_row(keys, tokens, parts, PARTS: tl.constexpr, EARLY: tl.constexpr):
    """keys [N, parts] -> tokens [N] int64, -1 where the largest logit is not finite; grid (N,)."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    best = tl.max(tl.load(keys + row * parts + part, mask=part < parts, other=LEAST), 0)
    key = best >> 32
    finite = (key < INF_KEY) & (key > -INF_KEY - 1)
    token = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    tl.store(tokens + row, tl.where(finite, token, -1))
