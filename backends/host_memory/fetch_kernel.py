"""Reads a step from the host's memory and writes it where captured graphs read it."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["words", "num_ids", "start", "distance", "requests", "width", "group_stride", "row_stride", "of_words", "of_table"]
)
def fetch_step(memory, into, tables, tokens, words, num_ids, start, distance, requests, width, group_stride, row_stride, of_words,
               of_table, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """memory -> into [words] int64, of which the first `num_ids` are replaced by tokens [-1 - id] where they are below 0; and page tables
    [groups, requests, width] int32 from `start` on, `distance` apart -> tables [groups, .., ..].

    The grid has `of_words` programs for the words, then `of_table` for each group. EARLY: `memory` was written by the host.
    """
    program, lane = tl.program_id(0), tl.arange(0, BLOCK)
    if program < of_words:
        word = program * BLOCK + lane
        there = word < words
        # volatile: the host writes this memory anew, so that nothing of it may come from a cache.
        number = tl.load(memory + word, mask=there, other=0, volatile=True)
        if EARLY:
            tl.extra.cuda.gdc_wait()  # above: only reads of the host's memory; below: reads of earlier kernels' results, and writes
            tl.extra.cuda.gdc_launch_dependents()
        unknown = there & (word < num_ids) & (number < 0)
        token = tl.load(tokens + (-1 - number), mask=unknown, other=0)
        tl.store(into + word, tl.where(unknown, tl.maximum(token, 0), number), mask=there)
    else:
        group = (program - of_words) // of_table
        entry = (program - of_words - group * of_table) * BLOCK + lane
        row = entry // width
        there = row < requests
        pages = memory.to(tl.pointer_type(tl.int32)) + start + group * distance
        page = tl.load(pages + entry, mask=there, other=0, volatile=True)
        if EARLY:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        place = group.to(tl.int64) * group_stride + row.to(tl.int64) * row_stride + (entry - row * width)
        tl.store(tables + place, page, mask=there)
