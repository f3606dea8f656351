"""Finds the tokens of a row that may be sampled, and samples one, without sorting: integer sums do not depend on their order.

A logit's place in the order of numbers is its `key`, 0 to 2^32 - 1. A token's weight is exp((logit - largest) / temperature) in units of
2^-scale, truncated: equal tokens weigh the same, and no sum is rounded. Top-k and top-p both need the least key up to which the tokens'
count or weight exceeds a target. It is found digit by digit (radix select): `spread` adds up a row for every value of the next digit, and
`choose` finds the value in which the target lies.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-1)
MOST_BITS = tl.constexpr(11)  # in one digit


@triton.jit
def wait(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _key(logit):
    """float32 -> uint32"""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # no -0.0
    return tl.where(bits < 0, bits ^ -1, bits ^ -(2**31)).to(tl.uint32, bitcast=True)


@triton.jit
def _logit(key):
    """int64 -> float32"""
    bits = key.to(tl.uint32).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -(2**31), bits ^ -1).to(tl.float32, bitcast=True)


@triton.jit
def _start(logits, rows, best, temperatures, row, stride):
    """The start of the row, its largest logit, and 1 / temperature, never infinite nor so small that the GPU flushes it to 0."""
    source = tl.load(rows + row)
    start = logits + source * stride
    largest = tl.load(start + tl.maximum(tl.load(best + source), 0)).to(tl.float32)
    return start, largest, tl.minimum(tl.maximum(1.0 / tl.load(temperatures + row), 1.1754944e-38), 3.4e38)


@triton.jit
def _share(logit, largest, sharpness):
    return tl.exp((logit - largest) * sharpness)


@triton.jit
def _weight(share, SCALE: tl.constexpr):
    return (share * SCALE).to(tl.int64)


@triton.jit(do_not_specialize=["first_row"])
def spread(logits, rows, best, temperatures, floors, found, sums, vocabulary, stride, first_row,
           COUNT: tl.constexpr, HAS_FLOOR: tl.constexpr, FIRST: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr,
           SCALE: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Rows from `first_row` on: counts (COUNT) or weighs the tokens whose key starts with found [N, 3] int64, by the key's next digit of
    BITS bits at SHIFT, and adds this to sums [N, 2^MOST_BITS] int64; tokens are weighed if their key is at least floors [N] int64. Grid
    (rows, parts)."""
    wait(EARLY)
    row, part = first_row + tl.program_id(0), tl.program_id(1)
    start, largest, sharpness = _start(logits, rows, best, temperatures, row, stride)
    token = part * PART + tl.arange(0, PART)
    logit = tl.load(start + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    key = _key(logit)
    counts = logit > float("-inf")  # the many tokens that a guide forbids would all be added to one number, one after another
    if not FIRST:
        counts &= (key >> (SHIFT + BITS)) == tl.load(found + row * 3).to(tl.uint32)
    if HAS_FLOOR:
        counts &= key >= tl.load(floors + row).to(tl.uint32)
    if COUNT:
        weight = tl.full([PART], 1, tl.int64)
    else:
        weight = _weight(_share(logit, largest, sharpness), SCALE)
        counts &= weight > 0
    digit = ((key >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
    tl.atomic_add(sums + (row.to(tl.int64) << MOST_BITS) + digit, weight, mask=counts, sem="relaxed")


@triton.jit(do_not_specialize=["first_row"])
def choose(logits, rows, best, temperatures, lowest, shares, floors, found, sums, keys, drops, vocabulary, stride, first_row,
           COUNT: tl.constexpr, HAS_FLOOR: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """Finds one more digit of the key; grid (N, 1). Rows before `first_row` may sample any token.

    The target is `lowest` [N] int64 tokens (COUNT), or `shares` [N] float64 of the row's weight. found [N, 3] int64: the digits so far, the
    sum below them, the target. sums are zeroed again. After the LAST digit: keys [N] int64, the lowest key that may be sampled, -1 for any;
    drops [N] int64, how many of the tokens with that key may not be sampled, the first ones.
    """
    wait(EARLY)
    row = tl.program_id(0)
    least, dropped = tl.full((), NO_KEY, tl.int64), tl.full((), 0, tl.int64)
    if row >= first_row:
        digit = tl.arange(0, 1 << BITS)
        place = sums + (row.to(tl.int64) << MOST_BITS) + digit
        weight = tl.load(place)
        tl.store(place, tl.zeros([1 << BITS], tl.int64))
        if FIRST:
            key, below, total = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.sum(weight, 0)
            if COUNT:
                target = tl.load(lowest + row)
                below += vocabulary - total
            else:
                left_out = tl.load(shares + row)
                target = tl.minimum((left_out * total.to(tl.float64)).to(tl.int64), total - 1)  # keeps the last token
                target = tl.where(left_out < 0, -1, target)
        else:
            key, below, target = tl.load(found + row * 3), tl.load(found + row * 3 + 1), tl.load(found + row * 3 + 2)
        chosen = tl.sum((below + tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
        chosen = tl.minimum(chosen, (1 << BITS) - 1)
        key = (key << BITS) + chosen
        below += tl.sum(tl.where(digit < chosen, weight, 0), 0)
        if LAST:
            if COUNT:
                least = key
            elif target >= 0:
                least = key
                _, largest, sharpness = _start(logits, rows, best, temperatures, row, stride)
                weight_of_key = _weight(_share(_logit(key), largest, sharpness), SCALE)
                dropped = (target - below) // tl.maximum(weight_of_key, 1)
            elif HAS_FLOOR:
                least = tl.load(floors + row)
        else:
            tl.store(found + row * 3, key)
            tl.store(found + row * 3 + 1, below)
            tl.store(found + row * 3 + 2, target)
    if LAST:
        tl.store(keys + row, least)
        tl.store(drops + row, dropped)


@triton.jit
def weigh(logits, rows, best, temperatures, min_p, keys, weights, ties, vocabulary, stride, parts,
          LIMITED: tl.constexpr, HAS_MIN_P: tl.constexpr, SCALE: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """For each part of a row: weights [N, parts] int64 of the tokens above the row's key; ties [N, parts] int64, the number of tokens with
    that key. Grid (N, parts)."""
    wait(EARLY)
    row, part = tl.program_id(0), tl.program_id(1)
    start, largest, sharpness = _start(logits, rows, best, temperatures, row, stride)
    token = part * PART + tl.arange(0, PART)
    logit = tl.load(start + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    share = _share(logit, largest, sharpness)
    least_share = tl.load(min_p + row) if HAS_MIN_P else 0.0
    allowed = share >= least_share
    if LIMITED:
        least, key = tl.load(keys + row), _key(logit).to(tl.int64)
        allowed &= key > least
        tl.store(ties + row * parts + part, tl.sum(((key == least) & (token < vocabulary)).to(tl.int64), 0))
    tl.store(weights + row * parts + part, tl.sum(tl.where(allowed, _weight(share, SCALE), 0), 0))


@triton.jit
def draw(logits, rows, best, temperatures, min_p, keys, drops, weights, ties, uniform, tokens, vocabulary, stride, parts,
         LIMITED: tl.constexpr, HAS_MIN_P: tl.constexpr, SCALE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
         IN_PLACE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """tokens [N] int64, by the inverse of the running sum of weights in the order of the ids, at uniform [N] float64; grid (N, 1).

    IN_PLACE: the rows' tokens replace those in `best` that are not below 0."""
    wait(EARLY)
    row = tl.program_id(0)
    start, largest, sharpness = _start(logits, rows, best, temperatures, row, stride)
    least_share = tl.load(min_p + row) if HAS_MIN_P else 0.0
    part = tl.arange(0, PARTS)
    weight = tl.load(weights + row * parts + part, mask=part < parts, other=0)
    if LIMITED:
        least, dropped = tl.load(keys + row), tl.load(drops + row)
        equal = tl.load(ties + row * parts + part, mask=part < parts, other=0)
        before = tl.cumsum(equal, 0) - equal
        share = _share(_logit(least), largest, sharpness)
        kept = equal - tl.minimum(tl.maximum(dropped - before, 0), equal)
        weight += kept * tl.where(share >= least_share, _weight(share, SCALE), 0)
    total = tl.sum(weight, 0)
    target = tl.minimum((tl.load(uniform + row) * total.to(tl.float64)).to(tl.int64), total - 1)
    chosen = tl.minimum(tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0), parts - 1)
    target -= tl.sum(tl.where(part < chosen, weight, 0), 0)
    token = chosen * PART + tl.arange(0, PART)
    logit = tl.load(start + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    share = _share(logit, largest, sharpness)
    allowed = share >= least_share
    if LIMITED:
        key = _key(logit).to(tl.int64)
        tied = (key == least) & (token < vocabulary)
        place = tl.cumsum(tied.to(tl.int64), 0) + tl.sum(tl.where(part < chosen, equal, 0), 0)  # counted from 1
        allowed &= (key > least) | (tied & (place > dropped))
    ends = tl.cumsum(tl.where(allowed, _weight(share, SCALE), 0), 0)
    found = chosen * PART + tl.sum((ends <= target).to(tl.int32), 0)
    found = tl.minimum(found, vocabulary - 1).to(tl.int64)
    if IN_PLACE:
        own = best + tl.load(rows + row)
        tl.store(own, found, mask=tl.load(own) >= 0)
    else:
        tl.store(tokens + row, found)
