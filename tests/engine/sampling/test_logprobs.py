"""Log-probabilities of many rows, a block at a time."""

from __future__ import annotations

import pytest
import torch

from paged_attn.engine.sampling import logprobs
from paged_attn.engine.sampling.logprobs import logprobs_of

VOCAB = 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_of_rows_at_a_time(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Of a batch of 256 and 128,256 tokens, six tensors of 131 MB would lie beside each other."""
    logits = torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(3)).to(dtype)
    rows, tokens = torch.tensor([0, 10, 3, 3, 7, 9, 1]), torch.tensor([5, 49, 0, 1, 2, 3, 4])
    wanted = dict(zip(range(20, 27), (0, 4, 1, 9, 0, 2, 3), strict=True))
    whole = logprobs_of(logits, wanted, rows, tokens)
    seen, softmax = list[int](), torch.Tensor.log_softmax
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda self, dim: seen.append(len(self)) or softmax(self, dim))
    monkeypatch.setattr(logprobs, "BLOCK_BYTES", 3 * 4 * VOCAB)
    cut = logprobs_of(logits, wanted, rows, tokens)
    assert seen == [3, 3, 1] and cut[:2] == whole[:2] == (list(wanted), list(wanted.values()))
    assert all(map(torch.equal, cut[2:], whole[2:]))
    expected = logits.double().log_softmax(-1)[rows]
    torch.testing.assert_close(whole.own.double(), expected.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5)
    for row, ids in zip(expected.tolist(), whole.top_ids.tolist(), strict=True):
        assert ids == sorted(range(VOCAB), key=lambda token: (-row[token], token))[:9]


def test_ids_without_a_logit_and_rows_that_are_not_finite() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1, 7], logits[2, 7], logits[3] = float("nan"), float("inf"), float("-inf")
    rows = torch.tensor([0, 0, 0, 1, 2, 3, 3])
    found = logprobs_of(logits, dict.fromkeys(range(7), 0), rows, torch.tensor([-1, VOCAB - 1, VOCAB, 3, 3, 3, VOCAB]))
    assert found.own[:3].tolist() == [found.own[1].item()] * 2 + [-float("inf")]
    assert bool(found.own[3:].isnan().all()) and found.top_ids.shape == (7, 0)
