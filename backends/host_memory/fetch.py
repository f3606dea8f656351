"""Brings a step to the device with one kernel, in place of a copy, a copy for each page table, and five kernels for the tokens.

Between a kernel and a copy engine a GPU idles for 6 to 8 us, in each direction (H200). A GPU reads pinned memory at its own address.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paged_attn.attn_ops.batch.step_buffers import TableCopy
from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.host_memory.fetch_kernel import fetch_step
from paged_attn.backends.host_memory.held import HeldMemory
from paged_attn.backends.machine import early_start

BLOCK = 512
MOST_BYTES = 256 << 10  # of larger steps, which take longer to run, a copy engine brings the numbers first
HELD = 8  # an event takes a GPU some time as well, so there is one for as many steps

_fetch = FastKernel(fetch_step)


class FetchKernel:
    """A `StepFetch` (`attn_ops/batch/step_buffers.py`).

    Args:
        tokens: [rows] int64 on the device; placeholder `-1 - row` stands for the token in `row`, or for 0 if that is below 0.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._no_tables = TableCopy(0, 0, 0, 1, torch.zeros(1, 1, 1, dtype=torch.int32, device=tokens.device))
        self._unread: list[Tensor] = []
        self._being_read = HeldMemory()

    def __call__(self, memory: Tensor, into: Tensor, num_ids: int, tables: TableCopy | None) -> None:
        on_gpu = into.is_cuda
        from_host = memory.nbytes <= MOST_BYTES
        if on_gpu and from_host:
            self._hold(memory)
        elif not from_host:
            memory = into.copy_(memory, non_blocking=True)
        words = len(memory) if tables is None else tables.start // 2
        start, distance, requests, width, table_into = tables or self._no_tables
        of_words, of_table = triton.cdiv(words, BLOCK), triton.cdiv(requests * width, BLOCK)
        options = early_start(into.device, on_gpu and from_host)
        early = options.pop("EARLY")
        _fetch(
            (BLOCK, early), (of_words + of_table * len(table_into), 1),
            (memory, into, table_into, self._tokens, words, num_ids, start, distance, requests, width, table_into.stride(0),
             table_into.stride(1), of_words, max(of_table, 1)),
            {"BLOCK": BLOCK, "EARLY": early}, {"num_warps": 4, **options}, device_index(into.device),
        )  # fmt: skip

    def _hold(self, memory: Tensor) -> None:
        """Keep it until the kernel has read it."""
        if len(self._unread) == HELD:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._tokens.device))
            self._being_read.hold(self._unread, event)
            self._unread = []
        self._unread.append(memory)
