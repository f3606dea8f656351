"""Log-probabilities of many rows, a block at a time."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

from paged_attn import SamplingParams
from paged_attn.engine.sampling import sampler_output
from paged_attn.engine.sampling.sampler_output import logprobs_of
from tests.engine.models import make_llm, tiny, tokenizer
from tests.tiny_models import VOCAB as VOCABULARY

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
    monkeypatch.setattr(sampler_output, "BLOCK_BYTES", 3 * 4 * VOCAB)
    cut = logprobs_of(logits, wanted, rows, tokens)
    assert seen == [3, 3, 1] and cut[:2] == whole[:2] == (list(wanted), list(wanted.values()))
    assert all(map(torch.equal, cut[2:], whole[2:]))
    expected = logits.double().log_softmax(-1)[rows]
    torch.testing.assert_close(whole.own.double(), expected.gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5)
    for row, ids, token, rank in zip(expected.tolist(), whole.top_ids.tolist(), tokens.tolist(), whole.ranks.tolist(), strict=True):
        in_order = sorted(range(VOCAB), key=lambda token: (-row[token], token))
        assert ids == in_order[:9] and in_order[rank - 1] == token


def test_ids_without_a_logit_and_rows_that_are_not_finite() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1, 7], logits[2, 7], logits[3] = float("nan"), float("inf"), float("-inf")
    rows = torch.tensor([0, 0, 0, 1, 2, 3, 3])
    found = logprobs_of(logits, dict.fromkeys(range(7), 0), rows, torch.tensor([-1, VOCAB - 1, VOCAB, 3, 3, 3, VOCAB]))
    assert found.own[:3].tolist() == [found.own[1].item()] * 2 + [-float("inf")]
    assert bool(found.own[3:].isnan().all()) and found.top_ids.shape == (7, 0)


def test_log_probabilities_have_vllms_attributes_and_are_numbers() -> None:
    llm = make_llm(tokenizer=tokenizer())
    (found,) = llm.generate([[4, 50, 7, 8]], SamplingParams(max_tokens=5, temperature=2.0, seed=3, logprobs=2, prompt_logprobs=-1))
    with torch.no_grad():
        expected = tiny()(torch.tensor([[4, 50, 7, 8, *found.token_ids]])).logits[0].log_softmax(-1)
    rows = [*found.prompt_logprobs[1:], *found.logprobs]
    for row, token, values in zip(rows, [50, 7, 8, *found.token_ids], expected, strict=False):
        for each, known in row.items():
            assert known == known.logprob == pytest.approx(float(values[each]), abs=1e-5) and type(known.logprob) is float
            assert known.rank == 1 + int((values > values[each]).sum()) and known.decoded_token == tokenizer().decode([each])
        assert token in row
    assert [len(row) for row in found.prompt_logprobs[1:]] == [VOCABULARY] * 3
    assert found.cumulative_logprob == sum(row[token].logprob for row, token in zip(found.logprobs, found.token_ids, strict=True))
    again = pickle.loads(pickle.dumps(copy.deepcopy(found)))
    assert again == found and again.logprobs[0][found.token_ids[0]].rank == found.logprobs[0][found.token_ids[0]].rank
    assert json.loads(json.dumps(found.logprobs[0])) == {str(each): value for each, value in found.logprobs[0].items()}
    (plain,) = make_llm().generate([[4, 50, 7, 8]], SamplingParams(max_tokens=1, logprobs=1))
    assert next(iter(plain.logprobs[0].values())).decoded_token is None
