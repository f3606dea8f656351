"""The log-probability of a token of each row of logits, its rank and the most likely tokens, in two passes: parts of rows, then rows.

A logit and its token are one number, as in `greedy_kernel`: the largest of a part is taken out `keep` times.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.sampling.sample_kernel import wait

LEAST = tl.constexpr(-(2**63))


@triton.jit
def _own(logits, rows, tokens, row, vocabulary, stride):
    """The start of the row, its token within the vocabulary, and that token's logit."""
    start = logits + tl.load(rows + row) * stride
    token = tl.minimum(tl.maximum(tl.load(tokens + row), 0), vocabulary - 1)
    return start, token, tl.load(start + token).to(tl.float32)


@triton.jit(do_not_specialize=["keep"])
def score_part(logits, rows, tokens, heads, sums, ahead, vocabulary, stride, parts, keep, PART: tl.constexpr, EARLY: tl.constexpr):
    """heads [L, parts, keep] int64: the largest keys, in order; sums [L, parts, 2] float32: the largest logit m and the sum of exp(x - m);
    ahead [L, parts] int32: how many tokens are more likely than the row's, or as likely with a lower id. Grid (L, parts)."""
    wait(EARLY)
    row, part = tl.program_id(0), tl.program_id(1)
    start, own_token, own = _own(logits, rows, tokens, row, vocabulary, stride)
    token = part * PART + tl.arange(0, PART)
    there = token < vocabulary
    x = tl.load(start + token, mask=there, other=float("-inf")).to(tl.float32) + 0.0  # no -0.0
    place = row * parts + part
    largest = tl.max(x, 0)
    from_here = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(sums + place * 2, largest)
    tl.store(sums + place * 2 + 1, tl.sum(tl.exp(x - from_here), 0))
    is_ahead = there & ((x > own) | ((x == own) & (token < own_token)))
    tl.store(ahead + place, tl.sum(is_ahead.to(tl.int32), 0))
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # in the order of the numbers
    key = (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    key = tl.where(there, key, LEAST)
    for number in range(keep):
        best = tl.max(key, 0)
        tl.store(heads + place.to(tl.int64) * keep + number, best)
        key = tl.where(key == best, LEAST, key)


@triton.jit(do_not_specialize=["keep"])
def score_row(logits, rows, tokens, heads, sums, ahead, own, ranks, top_ids, top, vocabulary, stride, parts, keep,
              PARTS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """own [L] float32, ranks [L] int64, top_ids [L, keep] int64 and top [L, keep] float32 from what `score_part` found. Grid (L,)."""
    wait(EARLY)
    row = tl.program_id(0)
    _, _, logit = _own(logits, rows, tokens, row, vocabulary, stride)
    part = tl.arange(0, PARTS)
    there = part < parts
    place = row * parts + part
    largest = tl.load(sums + place * 2, mask=there, other=float("-inf"))
    share = tl.load(sums + place * 2 + 1, mask=there, other=0.0)
    most = tl.max(largest, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    above = tl.log(tl.sum(share * tl.exp(largest - most), 0))
    value = (logit - most) - above
    tl.store(own + row, tl.where((tl.load(tokens + row) >= vocabulary) & (value == value), float("-inf"), value))
    tl.store(ranks + row, 1 + tl.sum(tl.load(ahead + place, mask=there, other=0), 0).to(tl.int64))
    taken = tl.zeros([PARTS], tl.int32)
    for number in range(keep):
        heads_left = tl.load(heads + place.to(tl.int64) * keep + taken, mask=there & (taken < keep), other=LEAST)
        best = tl.max(heads_left, 0)
        taken += (heads_left == best).to(tl.int32)
        key = (best >> 32).to(tl.int32)
        its = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
        tl.store(top_ids + row * keep + number, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        tl.store(top + row * keep + number, (its - most) - above)
