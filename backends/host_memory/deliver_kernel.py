"""Writes a tensor to the host's memory."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def deliver_numbers(numbers, host, count, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """numbers -> host [count]; grid (cdiv(count, BLOCK),)."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(host + number, tl.load(numbers + number, mask=number < count), mask=number < count)
