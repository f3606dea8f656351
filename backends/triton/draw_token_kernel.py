"""Which tokens of a row may be drawn, and one of them, without sorting: sums of whole numbers, which are the same in any order.

A logit's place in the order of numbers is its `key`, 0 to 2^32 - 1. A token's weight is exp((logit - largest) / temperature) in units of
2^-scale, cut off: equal tokens weigh the same, and no sum is rounded. Top-k and top-p both ask for the least key up to which the tokens
count, or weigh, more than some target. `narrow` finds it digit by digit (radix select): each program sums up its part of a row for every
value of the next digit, and the next launch's programs all see from these sums in which of them the target lies.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

FROM_TAIL = tl.constexpr(-(2**62))  # the target is a share of the row's weight, which is not known yet
NO_KEY = tl.constexpr(-1)


@triton.jit
def _wait(EARLY: tl.constexpr):
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
    """Where the row starts, its largest logit, and 1 / temperature, never infinite nor so small that the GPU takes it for 0."""
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


@triton.jit
def _digit_chosen(state, sums, tails, row, parts, COUNT: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr):
    """The key's digits so far with one more, what lies below them, and the target."""
    part, digit = tl.arange(0, PARTS), tl.arange(0, 1 << BITS)
    place = (row * parts + part[:, None]) * (1 << BITS) + digit[None, :]
    sums_of_digits = tl.sum(tl.load(sums + place, mask=part[:, None] < parts, other=0), 0)
    key, below, target = tl.load(state + row * 3), tl.load(state + row * 3 + 1), tl.load(state + row * 3 + 2)
    if not COUNT:
        total = tl.sum(sums_of_digits, 0)
        tail = tl.load(tails + row)
        share = tl.minimum((tail * total.to(tl.float64)).to(tl.int64), total - 1)  # the last token stays
        target = tl.where(target == FROM_TAIL, tl.where(tail < 0, -1, share), target)
    ends = below + tl.cumsum(sums_of_digits, 0)
    chosen = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), (1 << BITS) - 1)
    below += tl.sum(tl.where(digit < chosen, sums_of_digits, 0), 0)
    return (key << BITS) + chosen, below, target


@triton.jit(do_not_specialize=["first_row", "turn", "shift"])
def narrow(logits, rows, best, temperatures, lowest, tails, floors, states, sums, vocabulary, stride, parts, first_row, turn, shift,
           COUNT: tl.constexpr, FIRST: tl.constexpr, HAS_FLOOR: tl.constexpr, SCALE: tl.constexpr, BITS: tl.constexpr,
           PART: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """One more digit of the key; grid (rows from `first_row` on, parts).

    COUNT: the target is `lowest` [N] int64 tokens (top-k), else the share `tails` [N] float64 of the weight of the tokens whose key is at
    least `floors` [N] int64 (top-p). states [2, N, 3] and sums [2, N, parts, 2^BITS] int64: half `turn` is written, the other one read.
    """
    _wait(EARLY)
    row, part, num_rows = first_row + tl.program_id(0), tl.program_id(1), first_row + tl.num_programs(0)
    digits: tl.constexpr = 1 << BITS
    digit = tl.arange(0, digits)
    states_then, sums_then = states + (1 - turn) * num_rows * 3, sums + (1 - turn) * num_rows * parts * digits
    states_now, sums_now = states + turn * num_rows * 3, sums + turn * num_rows * parts * digits
    mine = (row * parts + part) * digits
    if FIRST:
        key, below = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        target = tl.load(lowest + row) if COUNT else tl.full((), FROM_TAIL, tl.int64)
        any_left = tl.full((), 1, tl.int64)
    else:
        key, below, target = _digit_chosen(states_then, sums_then, tails, row, parts, COUNT, BITS, PARTS)
        any_left = tl.load(sums_then + mine + (key & (digits - 1)))
    if part == 0:
        tl.store(states_now + row * 3, key)
        tl.store(states_now + row * 3 + 1, below)
        tl.store(states_now + row * 3 + 2, target)
    number: tl.constexpr = tl.int32 if COUNT else tl.int64
    found = tl.zeros([digits, BLOCK], number)
    if any_left > 0:
        start, largest, sharpness = _start(logits, rows, best, temperatures, row, stride)
        if HAS_FLOOR:
            floor = tl.load(floors + row).to(tl.uint32)
        for block in range(0, PART, BLOCK):
            token = part * PART + block + tl.arange(0, BLOCK)
            logit = tl.load(start + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
            keys = _key(logit)
            inside = token < vocabulary
            if not FIRST:
                inside &= (keys >> (shift + BITS).to(tl.uint32)) == key.to(tl.uint32)
            if HAS_FLOOR:
                inside &= keys >= floor
            digit_of = tl.where(inside, ((keys >> shift.to(tl.uint32)) & (digits - 1)).to(tl.int32), -1)
            weight = tl.full([BLOCK], 1, number) if COUNT else _weight(_share(logit, largest, sharpness), SCALE)
            found += tl.where(digit_of[None, :] == digit[:, None], weight[None, :], 0)
    tl.store(sums_now + mine + digit, tl.sum(found, 1).to(tl.int64))


@triton.jit(do_not_specialize=["first_row", "num_rows", "turn"])
def settle(logits, rows, best, temperatures, tails, floors, states, sums, keys, drops, stride, parts, first_row, num_rows, turn,
           COUNT: tl.constexpr, HAS_FLOOR: tl.constexpr, SCALE: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """keys [N] int64: the least that may be drawn, -1 for any; drops [N] int64: how many of the tokens with that key may not be drawn, the
    first ones. Grid (N, 1); rows before `first_row` may draw any token."""
    _wait(EARLY)
    row = tl.program_id(0)
    least, dropped = tl.full((), NO_KEY, tl.int64), tl.full((), 0, tl.int64)
    if row >= first_row:
        states_then, sums_then = states + (1 - turn) * num_rows * 3, sums + (1 - turn) * num_rows * parts * (1 << BITS)
        key, below, target = _digit_chosen(states_then, sums_then, tails, row, parts, COUNT, BITS, PARTS)
        if COUNT or target >= 0:
            least = key
        if not COUNT:
            if target >= 0:
                _, largest, sharpness = _start(logits, rows, best, temperatures, row, stride)
                weight = _weight(_share(_logit(key), largest, sharpness), SCALE)
                dropped = (target - below) // tl.maximum(weight, 1)
            elif HAS_FLOOR:
                least = tl.load(floors + row)
    tl.store(keys + row, least)
    tl.store(drops + row, dropped)


@triton.jit
def weigh(logits, rows, best, temperatures, min_p, keys, weights, ties, vocabulary, stride, parts,
          LIMITED: tl.constexpr, HAS_MIN_P: tl.constexpr, SCALE: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Of each part of a row: weights [N, parts] int64 of the tokens above the row's key; ties [N, parts] int64, how many have that key.
    Grid (N, parts)."""
    _wait(EARLY)
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
         EARLY: tl.constexpr):  # fmt: skip
    """tokens [N] int64, by the inverse of the running sum of weights in the order of the ids, at uniform [N] float64; grid (N, 1)."""
    _wait(EARLY)
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
        place = tl.cumsum(tied.to(tl.int64), 0) + tl.sum(tl.where(part < chosen, equal, 0), 0)  # from 1 on
        allowed &= (key > least) | (tied & (place > dropped))
    ends = tl.cumsum(tl.where(allowed, _weight(share, SCALE), 0), 0)
    found = chosen * PART + tl.sum((ends <= target).to(tl.int32), 0)
    tl.store(tokens + row, tl.minimum(found, vocabulary - 1).to(tl.int64))
