"""Some of a batch's requests as a separate batch, for code that handles them apart from the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, mode_of
from paged_attn.attn_ops.batch.packed_ints import copy_to_device


def part_of(batch: Batch, requests: Sequence[int]) -> tuple[Batch, Tensor]:
    """A batch of these requests (by index, ascending) without padding, and which rows [tokens] of `batch` are its rows.

    The host does not wait while lengths are copied to the device.
    """
    device, new = batch.slots.device, [batch.query_lens_host[r] for r in requests]
    seq = [batch.seq_lens_host[r] for r in requests]
    starts = list(itertools.accumulate(batch.query_lens_host, initial=0))
    rows = np.concatenate([np.arange(starts[r], starts[r] + count) for r, count in zip(requests, new, strict=True)])
    at = copy_to_device(rows, device)
    which = copy_to_device(np.array(requests, dtype=np.int64), device)
    lengths = np.zeros((3, -(-(len(seq) + 1) // 4) * 4), np.int32)  # rows begin at multiples of 16 bytes, which kernels rely on
    lengths[0, : len(seq)], lengths[1, : len(seq)], lengths[2, : len(seq) + 1] = seq, new, list(itertools.accumulate(new, initial=0))
    on_device = copy_to_device(lengths, device)
    host, kept = batch.page_table_host, batch.checkpoints
    part = Batch(
        mode=mode_of(np.array(seq) - np.array(new), np.array(new)),
        page_size=batch.page_size,
        num_tokens=len(rows),
        num_logits=0,
        input_ids=batch.input_ids[at],
        positions=batch.positions[at],
        slots=batch.slots[at],
        page_table=batch.page_table[which],
        seq_lens=on_device[0, : len(seq)],
        query_lens=on_device[1, : len(seq)],
        query_start=on_device[2, : len(seq) + 1],
        logits_rows=batch.logits_rows[:0],
        state_slots=batch.state_slots[which],
        request_lens=batch.request_lens[which],
        seq_lens_host=tuple(seq),
        query_lens_host=tuple(new),
        state_slots_host=tuple(batch.state_slots_host[r] for r in requests) if batch.state_slots_host else (),
        page_table_host=None if host is None else host[list(requests)],
        checkpoints={index: kept[r] for index, r in enumerate(requests) if r in kept},
    )
    return part, at
