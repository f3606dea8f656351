"""The kernels that find each row's most likely token against PyTorch's argmax, bit for bit, on what argmax finds hard as well."""

from __future__ import annotations

import pytest
import torch

from paged_attn.engine.sampling.sampler import greedy_sample

pytest.importorskip("triton")
from paged_attn.backends.sampling.greedy import PART, serves
from paged_attn.backends.sampling.greedy import greedy_sample as by_kernels

INF, NAN = float("inf"), float("nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plainly(logits: torch.Tensor) -> torch.Tensor:
    best = logits.argmax(-1, keepdim=True)
    return torch.where(logits.gather(-1, best).isfinite(), best, -1).squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 2, 31, PART - 1, PART, PART + 1, 3 * PART + 5])
def test_as_argmax(dtype: torch.dtype, vocabulary: int) -> None:
    """In 16 bits many logits are equal: the first of them counts."""
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(vocabulary)).to(DEVICE, dtype)
    assert torch.equal(by_kernels(logits), plainly(logits))
    assert torch.equal(greedy_sample(logits), plainly(logits))
    for sample in (by_kernels, greedy_sample):
        memory = torch.full((11,), 7, device=DEVICE)
        assert sample(logits, memory[:9]).data_ptr() == memory.data_ptr()
        assert memory.tolist() == [*plainly(logits).tolist(), 7, 7]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([-3.0, -1.0, -2.0], 1),
        ([-1e38, -3e38], 0),
        ([-0.0, 0.0], 0),
        ([0.0, -0.0], 0),
        ([-INF, -3.4e38, -INF], 1),
        ([5.0, 7.0, 7.0], 1),
        ([-INF, -INF], -1),
        ([1.0, NAN, 9.0], -1),
        ([1.0, -NAN, 9.0], -1),
        ([1.0, INF, 9.0], -1),
        ([INF, NAN], -1),
        ([1e-45, 0.0, -1e-45], 0),
        ([3.4e38, 3.3e38], 0),
    ],
)
@pytest.mark.parametrize("place", [0, PART - 2, 2 * PART])
def test_hard_rows(numbers: list[float], expected: int, place: int) -> None:
    """Among forbidden tokens, at the edges of parts."""
    row = torch.full((1, 2 * PART + 8), -INF, device=DEVICE)
    row[0, place : place + len(numbers)] = torch.tensor(numbers)
    assert by_kernels(row).tolist() == plainly(row).tolist() == [expected if expected < 0 else place + expected]


def test_rows_of_a_wider_tensor() -> None:
    wide = torch.randn(4, 100, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(by_kernels(wide[:, 10:60]), plainly(wide[:, 10:60]))
    assert torch.equal(by_kernels(wide[::2]), plainly(wide[::2]))


def test_what_is_left_to_pytorch() -> None:
    assert serves(torch.zeros(2, 3))
    assert not any(map(serves, (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2).t(), torch.zeros(0, 3))))
