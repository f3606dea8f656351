"""Asks for the kernels of this room, and those that deliver tokens, before a request needs them: some sixty, a second each.

Nothing waits for them but a request that comes before its own are there. Without this, an engine's first sampled request would hold all
others up while its kernels were compiled one after the other. With few processors that takes a minute, beside the engine's own work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.backends.compiling.compile_ahead import compiling_ahead
from paged_attn.backends.host_memory.deliver import deliver
from paged_attn.backends.sampling import edits
from paged_attn.backends.sampling.greedy import greedy_sample
from paged_attn.backends.sampling.logprobs import score_rows
from paged_attn.backends.sampling.sample import sample_in_place, sample_tokens
from paged_attn.backends.sampling.sampling_tensors import SamplingTensors

ROWS, KEPT = 2, 5  # kernels are the same for other numbers
FILTERS = (("top_k", "top_p"), ("top_p",), (), ("top_k",), ("min_p",), ("top_k", "top_p", "min_p"))  # likely ones first


def ask_for_kernels(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Those that read a model's logits [N, vocabulary], and those that read the scores in float32 that edits make of them."""
    with compiling_ahead(device, urgent=False):
        logits, scores = (torch.empty(ROWS, vocabulary, dtype=each, device=device) for each in (dtype, torch.float32))
        ids, number = (torch.empty(ROWS, dtype=each, device=device) for each in (torch.int64, torch.float32))
        counts, masks = (torch.empty(ROWS, width, dtype=torch.int32, device=device) for width in (vocabulary, -(-vocabulary // 32)))
        _sample(logits)
        edits.penalise(scores, ids, counts, ids, (number, number, number))
        edits.forbid(scores, ids, masks)
        score_rows(logits, ids, ids, min(KEPT, vocabulary))
        deliver([ids, number], [ids, number])
        _sample(scores)


def _sample(logits: Tensor) -> None:
    best = greedy_sample(logits)
    real, exact = (torch.empty(ROWS, dtype=dtype, device=logits.device) for dtype in (torch.float32, torch.float64))
    for filters in FILTERS:
        limited = "top_k" in filters or "top_p" in filters
        of = SamplingTensors(
            best, real, exact, real if "min_p" in filters else None, best if "top_k" in filters else None,
            exact if "top_p" in filters else None, 0 if limited else ROWS,
        )  # fmt: skip
        sample_in_place(logits, best, of)
        sample_tokens(logits, best, of)
