"""Each row's most likely token on a GPU: as PyTorch's argmax, and in graphs behind kernels that are still under way."""

from __future__ import annotations

import pytest
import torch

from paged_attn.engine.sampling.sampler import greedy_sample

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 128256), (256, 128256), (3, 50257), (1, 1_000_003), (5, 7)])
def test_as_argmax(dtype: torch.dtype, rows: int, vocabulary: int) -> None:
    torch.manual_seed(rows)
    logits = torch.randn(rows, vocabulary, device="cuda").to(dtype)
    assert torch.equal(greedy_sample(logits), logits.argmax(-1))
    logits[0, vocabulary // 2] = NAN
    logits[-1] = -INF
    assert greedy_sample(logits)[[0, -1]].tolist() == [-1, -1]
    assert torch.equal(greedy_sample(logits)[1:-1], logits.argmax(-1)[1:-1])


def test_a_captured_one_waits_for_the_logits() -> None:
    weight = torch.randn(32000, 4096, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(16, 4096, device="cuda", dtype=torch.bfloat16)
    tokens = greedy_sample(x @ weight.t())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):  # each overwrites what the one before it reads, if memory is used again
            logits = x @ weight.t()
            tokens = greedy_sample(logits)
            logits.zero_()
    for seed in range(30):
        torch.manual_seed(seed)
        x.copy_(torch.randn(16, 4096))
        graph.replay()
        assert torch.equal(tokens, (x @ weight.t()).argmax(-1)), seed
