"""A chain of kernels that is captured, and replayed on other numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def check_replays(chain: Callable[[], Tensor], x: Tensor) -> None:
    """Each of many replays gives what the chain itself gives of the same random `x`, which it reads."""
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for seed in range(40):
        torch.manual_seed(seed)
        x.copy_(torch.randn(x.shape))
        expected = chain().clone()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected), seed
