"""Edits of scores [N, V] float32 in place: penalties for tokens that were there before, and the masks of guides. Grids (rows, parts)."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from paged_attn.backends.sampling.sample_kernel import wait

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def penalise_part(scores, rows, counts, count_rows, repetition, frequency, presence, vocabulary, stride, OUTPUT: tl.constexpr,
                  PART: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """counts [C, V] int32, of which the bits of OUTPUT count the output's tokens; rows, count_rows, penalties [L]."""
    wait(EARLY)
    which, part = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    there = token < vocabulary
    place = scores + tl.load(rows + which) * stride + token
    count = tl.load(counts + tl.load(count_rows + which) * vocabulary + token, mask=there, other=0)
    score = tl.load(place, mask=there, other=0.0)
    factor = tl.load(repetition + which)
    repeated = tl.where(score < 0, score * factor, tl.minimum(tl.div_rn(score, factor), LARGEST))
    repeated = tl.where(score != score, score, repeated)  # minimum drops NaN
    output = count & OUTPUT
    score = tl.where(count != 0, repeated, score)
    score -= output.to(tl.float32) * tl.load(frequency + which)
    score -= (output > 0).to(tl.float32) * tl.load(presence + which)
    tl.store(place, score, mask=there)


@triton.jit(do_not_specialize=["words"])
def forbid_part(scores, rows, masks, vocabulary, stride, words, PART: tl.constexpr, EARLY: tl.constexpr):
    """masks [L, words] int32: -inf for token i of row rows[l] unless bit i % 32 of word i // 32 is set."""
    wait(EARLY)
    which, part = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    word = tl.load(masks + which * words + token // 32, mask=token // 32 < words, other=0)
    forbidden = (token < vocabulary) & (((word >> (token % 32)) & 1) == 0)
    tl.store(scores + tl.load(rows + which) * stride + token, float("-inf"), mask=forbidden)
