"""A small ragged batch that shows whether paged attention computes what a model computes on each prompt alone.

Three prompts run together in two steps: whole prompts and first chunks, then a decode row and a second chunk. Their pages are
shuffled, and all other pages and slots hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paged_attn.attn_ops.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.kv_pool import KVPool
from paged_attn.attn_ops.spec import AttentionSpec
from paged_attn.backends.select import select_for_pool
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.run import runner_of

PROMPTS = (5, 24, 13)
PAGE_SIZE = 4
RELATIVE_TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-6}
LOW_PRECISION_TOLERANCE = 6e-2


def probe_prompts(device: torch.device, num_ids: int, longest: int | None = None) -> list[Tensor]:
    """Seeded random prompts [T] int64 with ids below `num_ids`, none longer than the model's positions."""
    generator = torch.Generator().manual_seed(20)
    lengths = [min(n, longest or n) for n in PROMPTS]
    return [torch.randint(0, num_ids, (n,), generator=generator).to(device) for n in lengths]


def run_ragged(
    layers: Sequence[AttentionSpec],
    prompts: list[Tensor],
    kv_dtype: torch.dtype,
    run: Callable[[Batch], Tensor],
    recurrent: Sequence[RecurrentLayer] = (),
) -> list[Tensor]:
    """Logits [T, vocabulary] of each prompt; `run` gives those of a batch's `logits_rows` [N, vocabulary], under its context."""
    counts = [-(-len(p) // PAGE_SIZE) for p in prompts]
    device = prompts[0].device
    pool = KVPool(layers, 3 + sum(counts), PAGE_SIZE, kv_dtype, device)
    pool.storage.fill_(float("nan"))
    free = list(range(2 + sum(counts), 1, -2)) + list(range(1 + sum(counts), 0, -2))
    tables = [[free.pop(0) for _ in range(n)] for n in counts]
    backend = select_for_pool("auto", pool).backend
    states = runner_of(recurrent, len(prompts), device)
    results: list[list[Tensor]] = [[] for _ in prompts]
    for step in _steps(layers, prompts):
        active = [i for i, (start, end) in enumerate(step) if end > start]
        requests = [
            BatchRequest(prompts[i][slice(*step[i])].tolist(), tables[i], step[i][0], step[i][1] - step[i][0], len(prompts) - i)
            for i in active
        ]
        batch = Batch.build(requests, PAGE_SIZE, device)
        with ForwardContext(batch, pool, backend, states):
            logits = run(batch)
        for i, rows in zip(active, logits[: batch.num_logits].split([len(r.tokens) for r in requests]), strict=True):
            results[i].append(rows)
    return [torch.cat(parts) for parts in results]


class Disagreement(NamedTuple):
    """Which probe prompt differs, by how much of its logits' size, and what is allowed."""

    prompt: int
    error: float
    limit: float


def first_disagreement(expected: Sequence[Tensor], got: Sequence[Tensor], slack: float = 0.0) -> Disagreement | None:
    """The first prompt whose logits [T, vocabulary] differ by more than their dtype and `slack` allow (NaN differs), or None."""
    for prompt, (one, other) in enumerate(zip(expected, got, strict=True)):
        error, limit = relative_error(one, other), tolerance(one.dtype) + slack
        if not error <= limit:
            return Disagreement(prompt, error, limit)
    return None


def tolerance(dtype: torch.dtype) -> float:
    return RELATIVE_TOLERANCE.get(dtype, LOW_PRECISION_TOLERANCE)


def relative_error(expected: Tensor, got: Tensor) -> float:
    """Largest difference over the largest magnitude, per row; of those the largest, or for 16-bit types the median, as rounding
    may route a few rows to other experts."""
    difference = (expected.float() - got.float()).abs().amax(-1)
    errors = difference / expected.float().abs().amax(-1).clamp_min(1e-6)
    if bool(errors.isnan().any()):
        return float("nan")
    return float(errors.max() if expected.dtype in RELATIVE_TOLERANCE else errors.median())


def _steps(layers: Sequence[AttentionSpec], prompts: list[Tensor]) -> list[list[tuple[int, int]]]:
    if not all(spec.causal for spec in layers):
        return [[(0, len(p)) for p in prompts]]
    first = (len(prompts[0]) - 1, len(prompts[1]) // 2 - 1, len(prompts[2]))
    return [[(0, n) for n in first], [(n, len(p)) for n, p in zip(first, prompts, strict=True)]]
