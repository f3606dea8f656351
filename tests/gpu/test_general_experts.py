"""The general kernels for experts at a published width, where blocks of weights are on their way while others are multiplied."""

from __future__ import annotations

import pytest
import torch

from paged_attn.backends.experts.triton import grouped
from paged_attn.backends.experts.triton.backend import TritonExpertsBackend
from tests.backends.experts.operands import GATINGS, close, in_float32, operands

pytestmark = pytest.mark.usefixtures("full_float32")
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 0.01}


@pytest.mark.parametrize("tokens", (3, 16, 80, 320, 3000))
@pytest.mark.parametrize("name", ("silu", "interleaved, clamped, alpha", "relu2 without a gate"))
@pytest.mark.parametrize("dtype", ALLOWED)
def test_every_tiling(dtype: torch.dtype, name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "hopper_products", lambda *given: None)
    given = operands(tokens, GATINGS[name], experts=8, hidden=2048, width=768, bias=True, dtype=dtype)
    assert close(TritonExpertsBackend().forward(*given), in_float32(given), ALLOWED[dtype])
