"""The adapter of each row in a step, on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.batch.packed_ints import IntBuffer, PackedInts, words
from paged_attn.attn_ops.batch.requests import RequestColumns
from paged_attn.attn_ops.batch.step_buffers import MIN_ROWS


class LoraSlots:
    """Slots of rows and of rows of logits, where captured graphs read them: at addresses that follow from a step's shape alone.

    Args:
        max_rows, max_logits: of a step that was captured; larger ones get memory of their own.
    """

    def __init__(self, max_rows: int, max_logits: int, device: torch.device) -> None:
        self._most = max(max_rows, MIN_ROWS), max(max_logits, MIN_ROWS)
        self._device, self._buffer = device, IntBuffer(words((), self._most), device)

    def given(self, batch: Batch, columns: RequestColumns | None) -> Batch:
        """The batch with the slots of its rows; -1 for padding, and for all if there are no columns. The step before loses its own."""
        sizes = batch.num_rows, batch.logits_rows.shape[0]
        fits = all(size <= most for size, most in zip(sizes, self._most, strict=True))
        packed = PackedInts((), sizes, self._device, self._buffer if fits else None)
        for field in packed.host:
            field.fill(-1)
        if columns is not None and columns.lora_slots is not None:
            for field, counts in zip(packed.host, (columns.num_new, columns.num_logits), strict=True):
                slots = np.repeat(columns.lora_slots, counts)
                field[: len(slots)] = slots
        rows, logits = packed.to_device()
        return replace(batch, lora_slots=rows, lora_logits_slots=logits)
