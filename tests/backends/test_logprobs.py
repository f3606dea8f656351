"""The kernels that compute log-probabilities against PyTorch's operations: ids and ranks exactly, values to float32's rounding."""

from __future__ import annotations

import pytest
import torch

from paged_attn.engine.sampling.sampler_output import logprobs_of, scored_plainly

pytest.importorskip("triton")
from paged_attn.backends.sampling.logprobs import MOST_LIKELY, PART, score_rows

INF, NAN = float("inf"), float("nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def compare(logits: torch.Tensor, rows: list[int], tokens: list[int], keep: int) -> None:
    on, chosen = torch.tensor(rows, device=DEVICE), torch.tensor(tokens, device=DEVICE)
    ours, plain = score_rows(logits, on, chosen, keep), scored_plainly(logits, on, chosen, keep)
    for got, expected in zip(ours, plain, strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape
    finite = ~plain[0].isnan()
    assert torch.equal(ours[0].isnan(), ~finite)
    assert torch.equal(ours[1][finite], plain[1][finite]) and torch.equal(ours[2][finite], plain[2][finite])
    torch.testing.assert_close(ours[0], plain[0], rtol=0, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(ours[3][finite], plain[3][finite], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 2, 31, PART - 1, PART, PART + 1, 3 * PART + 5])
def test_as_pytorch(dtype: torch.dtype, vocabulary: int) -> None:
    """In 16 bits many logits are equal: the lower id comes first."""
    logits = (3 * torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(vocabulary))).to(DEVICE, dtype)
    rows, tokens = [0, 5, 3, 3, 2], [0, vocabulary - 1, vocabulary // 2, vocabulary, -1]
    for keep in {0, 1, min(5, vocabulary), min(20, vocabulary)}:
        compare(logits, rows, tokens, keep)


@pytest.mark.parametrize(
    "numbers",
    [[-0.0, 0.0, -1.0], [7.0, 7.0, 7.0], [1e38, 1e38], [-INF, -INF], [1.0, NAN], [INF, 1.0], [88.0, -88.0], [1e-45, 0.0]],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, PART - 2, 2 * PART])
def test_hard_rows(numbers: list[float], place: int) -> None:
    """Among forbidden tokens, at the edges of parts: more are asked for than there are."""
    row = torch.full((1, 2 * PART + 8), -INF, device=DEVICE)
    row[0, place : place + len(numbers)] = torch.tensor(numbers)
    compare(row, [0] * 3, [place, place + 1, (place + 5) % row.shape[1]], 6)


def test_rows_of_a_wider_tensor_and_each_row_for_itself() -> None:
    wide = torch.randn(4, 100, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    compare(wide[:, 10:60], [3, 1], [4, 49], 7)
    rows, tokens = torch.arange(4, device=DEVICE), torch.tensor([3, 9, 27, 81], device=DEVICE)
    together = score_rows(wide, rows, tokens, 5)
    for row in range(4):
        alone = score_rows(wide, rows[row : row + 1], tokens[row : row + 1], 5)
        assert all(torch.equal(one[0], all_of[row]) for one, all_of in zip(alone, together, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="on a CPU PyTorch's operations are used")
@pytest.mark.parametrize("count", [0, 5, MOST_LIKELY, MOST_LIKELY + 1])
def test_which_of_the_two_is_used_makes_no_difference(count: int) -> None:
    logits, rows, tokens = (
        torch.randn(40, 128_256, device=DEVICE).bfloat16(),
        torch.arange(40, device=DEVICE),
        torch.arange(40, device=DEVICE),
    )
    found = logprobs_of(logits, dict.fromkeys(range(40), count), rows, tokens)
    plain = scored_plainly(logits, rows, tokens, count)
    assert torch.equal(found.ranks, plain[1]) and torch.equal(found.top_ids, plain[2])
    torch.testing.assert_close(found.top, plain[3], rtol=0, atol=1e-5)
