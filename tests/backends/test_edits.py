"""The kernels that edit scores against PyTorch's operations, bit for bit but for one rounding of penalties."""

from __future__ import annotations

import pytest
import torch

from paged_attn.backends.sampling.sampling_tensors import IN_PROMPT
from paged_attn.engine.sampling.structured.guides import forbid_plainly
from paged_attn.engine.sampling.token_counts import penalised

pytest.importorskip("triton")
from paged_attn.backends.sampling.edits import PART, forbid, penalise

INF, NAN = float("inf"), float("nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocabulary", [1, 31, 64, PART, PART + 1, 2 * PART + 5])
def test_penalties_as_with_pytorch(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    scores = (5 * torch.randn(6, vocabulary, generator=generator)).to(DEVICE)
    hard = torch.tensor([0.0, -0.0, -INF, NAN, 3.4e38, -3.4e38, 1e-45])[:vocabulary]
    scores[2, : len(hard)] = hard.to(DEVICE)
    counts = torch.randint(0, 4, (9, vocabulary), generator=generator, dtype=torch.int32)
    counts += IN_PROMPT * torch.randint(0, 2, counts.shape, generator=generator, dtype=torch.int32)
    counts = counts.to(DEVICE)
    rows, count_rows = torch.tensor([5, 0, 2], device=DEVICE), torch.tensor([1, 8, 3], device=DEVICE)
    penalties = tuple(
        torch.tensor(values, device=DEVICE) for values in ([1.3, 1.0, 1e-30], [0.5, 0.0, -2.0], [0.25, -1.5, 0.0])
    )  # fmt: skip
    expected = scores.clone()
    expected[rows] = penalised(scores[rows], counts[count_rows], *penalties)
    penalise(scores, rows, counts, count_rows, penalties)
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(scores[[1, 3, 4]], expected[[1, 3, 4]]) and torch.equal(scores.isinf(), expected.isinf())


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, PART + 1, 2 * PART + 40])
def test_masks_as_with_pytorch(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    scores, words = torch.randn(5, vocabulary, generator=generator).to(DEVICE), -(-vocabulary // 32)
    masks = torch.randint(-(2**31), 2**31, (3, words), generator=generator).to(DEVICE, torch.int32)
    masks[1] = 0
    rows = torch.tensor([4, 0, 2], device=DEVICE)
    expected = scores.clone()
    forbid_plainly(expected, rows, masks)
    forbid(scores, rows, masks)
    assert torch.equal(scores, expected) and bool((scores[0] == -INF).all()) and bool(scores[[1, 3]].isfinite().all())
