"""No kernel that chooses tokens is launched in a variant that `ask_for_kernels` had not asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")
from paged_attn.backends.host_memory.deliver import deliver
from paged_attn.backends.sampling import edits
from paged_attn.backends.sampling.ahead import ask_for_kernels
from paged_attn.backends.sampling.greedy import greedy_sample
from paged_attn.backends.sampling.logprobs import score_rows
from paged_attn.backends.sampling.sample import sample_in_place, sample_tokens
from paged_attn.backends.sampling.sampling_tensors import SamplingTensors
from tests.compiled.variants import CPU, variants


@pytest.mark.parametrize("vocabulary", [48, 2056, 2051])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_is_launched_that_was_not_asked_for(vocabulary: int, dtype: torch.dtype) -> None:
    with variants() as found:
        ask_for_kernels(vocabulary, dtype, CPU)
        assert not found.launched
        logits = torch.randn(3, vocabulary)
        for source in (logits.to(dtype), logits):
            best, rows = greedy_sample(source), torch.arange(3)
            for top_k, top_p, min_p in itertools.product((False, True), repeat=3):
                settings = SamplingTensors(
                    rows, torch.full((3,), 0.8), torch.full((3,), 0.5, dtype=torch.float64), torch.full((3,), 0.1) if min_p else None,
                    torch.full((3,), vocabulary - 9) if top_k else None, torch.full((3,), 0.1, dtype=torch.float64) if top_p else None,
                    1 if top_k or top_p else 3,
                )  # fmt: skip
                sample_tokens(source, best, settings)
                sample_in_place(source, best.clone(), settings)
        for keep in (0, 1, 3, 16):
            score_rows(logits.to(dtype), rows, best, keep)
        penalties = (torch.ones(3), torch.zeros(3), torch.zeros(3))
        edits.penalise(logits, rows, torch.zeros(8, vocabulary, dtype=torch.int32), rows, penalties)
        deliver([best, penalties[0]], [best.clone(), penalties[0].clone()])
        edits.forbid(logits, rows, torch.zeros(3, -(-vocabulary // 32), dtype=torch.int32))
    assert len({variant[0] for variant in found.launched}) == 11 and not found.missing, found.missing  # type: ignore[index]
