"""Modules that loop over tokens in Python, as remote code of linear attention does: a graph would hold for calls of one length, so they run
on all tokens of a request. The attention beside them is paged as ever."""

from __future__ import annotations

import logging
import math
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from paged_attn import LLM, SamplingParams, UnsupportedError
from tests.oracle import random_prompts

WIDTH, BLOCK = 32, 4


class SeenCache(Cache):
    """A list of states, and how many tokens they have seen, as flash-linear-attention's has them."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: list[Tensor] = []
        self.seen_tokens = 0

    def of(self, layer: int) -> Tensor | None:
        return self.states[layer] if layer < len(self.states) else None

    def set(self, layer: int, state: Tensor, tokens: int) -> None:
        self.seen_tokens += tokens if layer == 0 else 0
        self.states[layer : layer + 1] = [state]


class Loop(nn.Module):
    """s_t = decay_t * s_{t-1} + k_t v_t; out_t = q_t s_t, one token after the other."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.inputs, self.out = index, nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, past: Any = None) -> Tensor:
        q, k, v, decay = self.inputs(x).chunk(4, -1)
        state = past.of(self.index) if past is not None else None
        state = torch.zeros_like(x[:, 0]) if state is None else state
        rows, state = self.scan(q, k.sigmoid() * v, decay.sigmoid(), state)
        if past is not None:
            past.set(self.index, state, x.shape[1])
        return x + self.out(rows)

    def scan(self, q: Tensor, kv: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for i in range(q.shape[1]):
            state = state * decay[:, i] + kv[:, i]
            rows.append(q[:, i] * state)
        return torch.stack(rows, 1), state


class Blocks(Loop):
    """The same block after block, with scores of tokens against tokens inside one (MiniMax-Text-01)."""

    def scan(self, q: Tensor, kv: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        count, rows = (q.shape[1] + BLOCK - 1) // BLOCK, torch.empty_like(q)
        for i in range(count):
            start, end = i * BLOCK, min(i * BLOCK + BLOCK, q.shape[1])
            qs, part = q[:, start:end], kv[:, start:end]
            rows[:, start:end] = (qs @ part.mT).tril() @ part + qs * state[:, None]
            state = state * 0.5 + part.sum(1)
        return rows, state


class ByLength(Loop):
    """And by the logarithm of the number of tokens of the call, which Python computes, beyond the 600 that it was trained on."""

    def scan(self, q: Tensor, kv: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return super().scan(q * max(1.0, math.log(q.shape[1]) / math.log(600)), kv, decay, state)


class Attention(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.qkv, self.where = nn.Linear(WIDTH, 3 * WIDTH), nn.Embedding(256, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, past: Any = None) -> Tensor:
        q, k, v = ((part + self.where(positions)).unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, 96)
        self.layers = nn.ModuleList(kind(index) for index, kind in enumerate(kinds))
        for parameter in self.parameters():
            parameter.data.mul_(2.0)

    def forward(self, input_ids: Tensor, position_ids: Tensor, past: Any = None) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, past)
        return self.head(x)


class Cached(Model):
    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__(*kinds)
        self.config = PretrainedConfig(max_position_embeddings=256, use_cache=True)

    def forward(self, input_ids: Tensor, position_ids: Tensor, cache: Any = None, use_cache: bool = False) -> Any:
        return super().forward(input_ids, position_ids, SeenCache() if use_cache and cache is None else cache)


def assert_served(model: Model) -> list[str]:
    """Its tokens are its own, in chunks and with prefixes; returns how each layer was found."""
    prompts = random_prompts((1, 5, 17, 33))
    prompts.append(prompts[-1][:20] + [7])
    with torch.no_grad():
        expected = []
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(6):
                ids.append(int(model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1].argmax()))
            expected.append(ids[len(prompt) :])
        with LLM(model, page_size=4, num_pages=64, max_batch_tokens=16) as llm:
            for _ in ("cold", "warm"):
                assert [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=6))] == expected
            return [layer.found_by for layer in llm.engine.runner.compiled.rewrite.layers]


ALONE = "a module that mixes tokens"


@pytest.mark.parametrize("kind", [Loop, Blocks])
def test_a_loop_beside_attention(kind: type[Loop], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paged_attn"):
        assert assert_served(Model(kind, Attention).eval()) == [ALONE, "F.sdpa"]
    assert "all tokens of a request run through layers.0, which" in caplog.text
    assert "can only be captured" not in caplog.text  # it is served for more positions


class Summaries(nn.Module):
    """Each token takes in the means of the blocks before its own, which a loop over blocks computes (MoBA's own code): a trace holds for
    one number of blocks, and none says that the number of tokens became a constant."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, past: Any = None) -> Tensor:
        return x + self.out(self.before(x))

    def before(self, x: Tensor) -> Tensor:
        blocks = [x[:, at * BLOCK : (at + 1) * BLOCK].mean(1) for at in range((x.shape[1] + BLOCK - 1) // BLOCK)]
        sums = F.pad(torch.stack(blocks, 1), (0, 0, 1, 0)).cumsum(1)
        return sums[:, torch.arange(x.shape[1]) // BLOCK]


def test_a_loop_over_blocks_of_tokens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paged_attn"):
        assert assert_served(Model(Summaries, Attention).eval()) == [ALONE, "F.sdpa"]
    assert "all tokens of a request run through layers.0, which" in caplog.text


def test_a_loop_over_blocks_in_the_models_own_forward_is_refused() -> None:
    class InForward(Model):
        def forward(self, input_ids: Tensor, position_ids: Tensor, past: Any = None) -> Any:
            x = super().forward(input_ids, position_ids)
            return x + 0 * torch.stack([x[:, at * BLOCK : (at + 1) * BLOCK].mean() for at in range((x.shape[1] + 3) // BLOCK)]).sum()

    words = r"InForward cannot be captured .*: it holds for calls of \d+ to \d+ tokens only, .*, at .*test_loops_over_tokens.py:\d+\. "
    with pytest.raises(UnsupportedError, match=words):
        LLM(InForward(Attention).eval(), num_pages=64)


def test_a_number_in_the_code_from_which_on_a_call_is_another_is_tried() -> None:
    with pytest.raises(UnsupportedError, match=r"layers.0: a module that mixes .* a later token changes the result of an earlier one"):
        LLM(Model(ByLength, Attention).eval(), num_pages=64)


def test_a_state_in_a_cache_that_counts_tokens() -> None:
    """Which no slot of a request can hold."""
    assert assert_served(Cached(Loop, Attention, Loop).eval()) == [ALONE, "F.sdpa", ALONE]


@dataclass
class WithState(ModelOutput):
    logits: Any = None
    state: Any = None


class ForgetsAtOnce(nn.Module):
    """Of a prompt it reads no state."""

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        known = state if state is not None and x.shape[1] == 1 else torch.zeros_like(x[:, :1])
        return x + known, None if state is None else state + x.sum(1, keepdim=True)


class GivesState(nn.Module):
    config = types.SimpleNamespace(use_cache=True)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(96, WIDTH), ForgetsAtOnce()

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        x = self.embed(input_ids)
        x, state = self.cell(x, torch.zeros(1, 1, WIDTH) if use_cache else None)
        return WithState(logits=x @ self.embed.weight.T, state=state)


def test_a_state_that_is_given_back_is_not_what_is_wrong() -> None:
    with pytest.raises(UnsupportedError, match="cell keeps recurrent state, but its own forward gives another result token by token"):
        LLM(GivesState().eval(), num_pages=16)
