"""Penalties and masks of guides on a GPU, each in one launch.

PyTorch's operations pass over the scores some twenty times for penalties: a twentieth of a step of 128 requests and 128,256 tokens.
"""

from __future__ import annotations

import triton
from torch import Tensor

from paged_attn.backends.fast_launch import FastKernel, device_index
from paged_attn.backends.machine import machine_of
from paged_attn.backends.sampling.edit_kernel import forbid_part, penalise_part
from paged_attn.backends.sampling.sampling_tensors import OF_OUTPUT

PART = 2048  # scores per program
_penalise, _forbid = FastKernel(penalise_part), FastKernel(forbid_part)


def penalise(scores: Tensor, rows: Tensor, counts: Tensor, count_rows: Tensor, penalties: tuple[Tensor, Tensor, Tensor]) -> None:
    """What `engine/sampling/token_counts.penalised` gives, in place, for some rows of scores [N, V] float32.

    Args:
        rows, count_rows: [L] int64, of the scores and of counts [C, V] int32.
        penalties: of repetition, frequency and presence, [L] float32.
    """
    vocabulary, stride = scores.shape[1], scores.stride(0)
    early = machine_of(scores.device).early
    _penalise(
        (vocabulary, stride), (len(rows), triton.cdiv(vocabulary, PART)),
        (scores, rows, counts, count_rows, *penalties, vocabulary, stride), {"OUTPUT": OF_OUTPUT, "PART": PART, "EARLY": early},
        {"num_warps": 4, "launch_pdl": early}, device_index(scores.device),
    )  # fmt: skip


def forbid(scores: Tensor, rows: Tensor, masks: Tensor) -> None:
    """scores [N, V] float32, in place: -inf for what masks [L, words] int32 of rows [L] int64 do not allow, past their end as well."""
    vocabulary, stride, words = scores.shape[1], scores.stride(0), masks.shape[1]
    early = machine_of(scores.device).early
    _forbid(
        (vocabulary, stride), (len(rows), triton.cdiv(vocabulary, PART)), (scores, rows, masks, vocabulary, stride, words),
        {"PART": PART, "EARLY": early}, {"num_warps": 4, "launch_pdl": early}, device_index(scores.device),
    )  # fmt: skip
