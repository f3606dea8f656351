"""Each row's sampling settings on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_attn.attn_ops.batch.packed_ints import PackedInts
from paged_attn.backends.sampling.sampling_tensors import SamplingTensors
from paged_attn.engine.sampling.sampling_state import SamplingState

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)


class RowSettings(NamedTuple):
    """The settings of some rows on the device, from one copy."""

    rows: Tensor
    counting: Tensor  # rows, among those of the step, that have penalties
    count_rows: Tensor
    penalties: tuple[Tensor, Tensor, Tensor]
    drawn: SamplingTensors

    @classmethod
    def of(
        cls, rows: Sequence[int], states: Sequence[SamplingState], counting: Sequence[int], count_rows: Sequence[int], edited: bool,
        logits: Tensor,
    ) -> RowSettings:  # fmt: skip
        """`edited`: tokens are drawn from scores that have these rows only, and not from the logits."""
        vocab = logits.shape[-1]
        drawn = [state for state in states if not state.params.is_greedy]
        params, counted = [state.params for state in drawn], [states[number].params for number in counting]
        greedy, num_random, num_counting = len(states) - len(drawn), len(drawn), len(counting)
        packed = PackedInts(
            (len(rows), num_counting, num_counting, *(num_random,) * 4), (*(num_counting,) * 3, *(num_random,) * 2), logits.device
        )
        host = packed.host
        host[0][:], host[1][:], host[2][:] = rows, counting, count_rows
        host[3][:] = range(greedy, len(rows)) if edited else rows[greedy:]
        host[4][:] = [vocab - min(p.top_k or vocab, vocab) for p in params]
        host[5].view(np.float64)[:] = [state.uniform for state in drawn]
        host[6].view(np.float64)[:] = _left_out([p.top_p for p in params])
        reals: list[list[float]] = [
            [max(p.repetition_penalty, SMALLEST) for p in counted],  # float32 would make it 0
            [p.frequency_penalty for p in counted],
            [p.presence_penalty for p in counted],
            [p.temperature for p in params],
            [p.min_p for p in params],
        ]
        for memory, values in zip(host[7:], reals, strict=True):
            memory.view(np.float32)[:] = np.clip(values, -LARGEST, LARGEST)
        on = packed.to_device()
        repetition, frequency, presence, temperature, min_p = (tensor.view(torch.float32) for tensor in on[7:])
        settings = SamplingTensors(
            on[3],
            temperature,
            on[5].view(torch.float64),
            min_p if any(p.min_p for p in params) else None,
            on[4] if any(p.top_k for p in params) else None,
            on[6].view(torch.float64) if any(p.top_p < 1.0 for p in params) else None,
            sum(not p.has_limit for p in params),
        )
        return cls(on[0], on[1], on[2], (repetition, frequency, presence), settings)


def _left_out(top_p: Sequence[float]) -> NDArray[np.float64]:
    """The largest sums that count as no more than 1 - top_p: it is rounded to float32 from float64, and so is the sum, as in transformers.
    Negative for top-p 1, which must not leave out tokens whose probability underflowed."""
    whole = np.array(top_p)
    left_out = (1.0 - whole).astype(np.float32)
    return np.where(whole < 1.0, (left_out.astype(np.float64) + np.nextafter(left_out, np.float32(2.0)).astype(np.float64)) / 2, -1.0)
