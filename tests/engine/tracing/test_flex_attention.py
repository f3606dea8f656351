"""Models that call flex_attention, with a block mask made in the forward, generate through the engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from paged_attn import LLM, SamplingParams, UnsupportedError
from tests.oracle import greedy as generated
from tests.oracle import random_prompts
from tests.tiny_models import build

WINDOW = 6
OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
needs_symbolic_length = pytest.mark.skipif(OLD_TORCH, reason="Dynamo of torch 2.11 makes a constant of the length in flex_attention")


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def windowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < WINDOW)


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (k - q) * 0.5 ** (h + 1)


def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 20.0 * torch.tanh(score / 20.0)


def causal_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q >= k, score, float("-inf"))


class Model(nn.Module):
    def __init__(self, score_mod: Callable[..., Tensor] | None, mask_mod: Callable[..., Tensor] | None, kv_heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score_mod, self.mask_mod, self.kv_heads = score_mod, mask_mod, kv_heads
        self.embed, self.positions, self.head = nn.Embedding(96, 32), nn.Embedding(256, 32), nn.Linear(32, 96)
        self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 16 * kv_heads)
        for parameter in self.parameters():
            parameter.data.mul_(2.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = q.shape[2]
        block_mask = create_block_mask(self.mask_mod, None, None, tokens, tokens, device="cpu") if self.mask_mod else None
        result: Any = flex_attention(q, k, v, score_mod=self.score_mod, block_mask=block_mask, enable_gqa=self.kv_heads < 4)
        return result  # type: ignore[no-any-return]

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(position_ids)
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.kv_heads, 8)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        return self.head(x + self.attend(q, k, v).transpose(1, 2).flatten(2))


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1].argmax()))
    return ids[len(prompt) :]


@needs_symbolic_length
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("score_mod", "mask_mod", "kv_heads", "says"),
    [
        (None, windowed, 2, {"sliding_window": WINDOW, "num_kv_heads": 2}),
        (alibi, causal, 4, {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)}),
        (capped, causal, 2, {"softcap": 20.0}),
        (causal_score, None, 4, {"sliding_window": None}),
    ],
)
def test_flex_attention_generates(score_mod: Any, mask_mod: Any, kv_heads: int, says: dict[str, Any]) -> None:
    model = Model(score_mod, mask_mod, kv_heads).eval()
    prompts = random_prompts((1, 5, 17, 33))
    with torch.no_grad(), LLM(model, max_batch_tokens=16, num_pages=64) as llm:
        (layer,) = llm.engine.runner.compiled.rewrite.layers
        assert layer.found_by == "flex_attention" and layer.spec.causal
        assert {name: getattr(layer.spec, name) for name in says} == {n: pytest.approx(v) for n, v in says.items()}
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=6))]
        assert got == [greedy(model, prompt, 6) for prompt in prompts]


class UsesLogSumExp(Model):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, lse = flex_attention(q, k, v, score_mod=causal_score, return_lse=True, enable_gqa=True)
        return output * lse[..., None]


@pytest.mark.filterwarnings("ignore")
def test_its_log_sum_exp_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="log-sum-exp is used"):
        LLM(UsesLogSumExp(None, None).eval(), num_pages=16)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_transformers_model_that_was_set_to_it_is_traced_as_sdpa(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask reads a tensor by position, for which flex_attention has no form on all tokens at once.

    The model's own calls, which the self-check compares with, run flex_attention as it is; transformers would compile C++ for long.
    """
    wrapped = importlib.import_module("transformers.integrations.flex_attention").WrappedFlexAttention
    monkeypatch.setattr(wrapped, "__call__", lambda self: flex_attention)
    model, prompts = build(name, num_hidden_layers=2), random_prompts((5, 33, 140))
    expected = [generated(model, prompt, 4) for prompt in prompts]
    model.set_attn_implementation("flex_attention")
    with LLM(model, num_pages=64) as llm:
        assert [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=4))] == expected
    assert model.config._attn_implementation == "flex_attention"
