"""Models that nobody can serve are refused with what is wrong with them, and what to do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paged_attn import LLM, UnsupportedError
from paged_attn.engine.tracing.trace_model import only_device
from tests.engine.tracing.multihead import VOCAB, WIDTH, Multihead
from tests.tiny_models import build


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_weights_that_are_no_numbers(number: str) -> None:
    model = build("llama", tie_word_embeddings=False)
    model.lm_head.weight.data[3] = float(number)
    with pytest.raises(UnsupportedError, match=r"itself gives logits that are infinite or NaN for .* look at its weights"):
        LLM(model, num_pages=20)


def test_logits_of_minus_infinity_are_served() -> None:
    """So models keep ids from being generated."""
    model = Multihead(need_weights=False).eval()
    model.head.bias.data[3:9] = -torch.inf
    with LLM(model, num_pages=20) as llm:
        assert llm.generate([[4, 5]])[0].token_ids[0] == int(model(torch.tensor([[4, 5]]))[0, -1].argmax())


class Cropped(nn.Module):
    """Of more tokens than it has positions only the last ones count."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Multihead(need_weights=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(ids[:, -64:])


def test_some_tokens_of_a_call() -> None:
    with pytest.raises(UnsupportedError):
        LLM(Cropped().eval(), num_pages=20)


class BringsTokens(nn.Module):
    """Three learned tokens in front of every prompt (Hymba's meta tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.meta = nn.Parameter(torch.randn(1, 3, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.meta, self.embed(ids)], 1)
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        return self.head(x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])[:, 3:]


def test_tokens_that_the_model_brings() -> None:
    with pytest.raises(UnsupportedError, match="over 3 positions more than the call has tokens: the model adds its own to every prompt"):
        LLM(BringsTokens().eval(), num_pages=20)


class BaseByLength(Multihead):
    """Qwen-7B's first code: a base of which Python takes the logarithm, the usual one up to 64 tokens."""

    def __init__(self) -> None:
        super().__init__(need_weights=False)
        self.use_dynamic_ntk = True

    def forward(self, ids: Tensor) -> Tensor:
        factor = max(2 ** math.ceil(math.log(ids.shape[1] / 64, 2) + 1) - 1, 1) if self.use_dynamic_ntk else 1
        return super().forward(ids) * (1.0 / factor)


def test_a_base_that_depends_on_the_length_says_what_to_set() -> None:
    model = BaseByLength().eval()
    with pytest.raises(UnsupportedError, match=r"for one length only, .* use_dynamic_ntk is True: .*\(model\.use_dynamic_ntk = False"):
        LLM(model, num_pages=20)
    model.use_dynamic_ntk = False
    with LLM(model, num_pages=20, max_model_len=64) as llm:
        assert llm.generate([[4, 5]])[0].token_ids[0] == int(model(torch.tensor([[4, 5]]))[0, -1].argmax())


class Parts(nn.Module):
    def __init__(self, second: str, hook: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(VOCAB, WIDTH), nn.Linear(VOCAB, WIDTH, device=second)
        if hook:
            self.second._hf_hook = object()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("model", "way"),
    [
        (Parts("meta", hook=True), "load it without offloading, since what lies on meta holds no numbers"),
        (nn.Linear(2, 2, device="meta"), "load it without offloading"),
        (nn.Identity(), r"no device; .*: model.to\(device\)"),
    ],
)
def test_several_devices(model: Any, way: str) -> None:
    with pytest.raises(UnsupportedError, match=way):
        only_device(model)
