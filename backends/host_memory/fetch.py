"""Brings numbers to the device with one kernel: a step, in place of a copy, a copy for each page table, and five kernels for the tokens.

Between a kernel and a copy engine a GPU idles for 6 to 8 us, in each direction (H200). A GPU reads pinned memory at its own address.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from paged_attn.attn_ops.batch.step_buffers import TableCopy
from paged_attn.backends.compiling.compile_ahead import is_compiling_ahead
from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.host_memory.fetch_kernel import fetch_step
from paged_attn.backends.host_memory.held import HeldMemory
from paged_attn.backends.machine import machine_of

BLOCK = 512
MOST_BYTES = 256 << 10  # more takes a copy engine less time, and steps that need more take longer to run

_fetch, _read = FastKernel(fetch_step), HeldMemory()


def fetch(into: Tensor, memory: Tensor) -> Tensor | None:
    """memory [..] int64, pinned, which nobody writes again -> `into`, of the same strides, on a GPU; None if it is to be copied."""
    if memory.nbytes > MOST_BYTES or is_compiling_ahead():
        return None
    if memory.numel():
        _launch(memory, into, into, 0, None)
    return into


class FetchKernel:
    """A `StepFetch` (`attn_ops/batch/step_buffers.py`).

    Args:
        tokens: [rows] int64 on the device; placeholder `-1 - row` stands for the token in `row`, or for 0 if that is below 0.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def __call__(self, memory: Tensor, into: Tensor, num_ids: int, tables: TableCopy | None) -> None:
        if memory.nbytes > MOST_BYTES:
            memory = into.copy_(memory, non_blocking=True)
        _launch(memory, into, self._tokens, num_ids, tables)


def _launch(memory: Tensor, into: Tensor, tokens: Tensor, num_ids: int, tables: TableCopy | None) -> None:
    device, from_host = device_index(into.device), memory is not into
    words = memory.numel() if tables is None else tables.start // 2
    start, distance, requests, width, table_into = tables or _no_tables(into.device)
    of_words, of_table = triton.cdiv(words, BLOCK), triton.cdiv(requests * width, BLOCK)
    early = from_host and machine_of(into.device).early
    _fetch(
        (BLOCK, early), (of_words + of_table * len(table_into), 1),
        (memory, into, table_into, tokens, words, num_ids, start, distance, requests, width, table_into.stride(0),
         table_into.stride(1), of_words, max(of_table, 1)),
        {"BLOCK": BLOCK, "EARLY": early}, {"num_warps": 4, "launch_pdl": early}, device,
    )  # fmt: skip
    if device >= 0 and from_host:
        _read.hold_in_use(memory, device)


@cache
def _no_tables(device: torch.device) -> TableCopy:
    return TableCopy(0, 0, 0, 1, torch.empty(1, 1, 1, dtype=torch.int32, device=device))
