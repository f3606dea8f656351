"""Attention whose mask, bias or scale is read from tensors: proved as far as they reach, and not gone on with once they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paged_attn
from paged_attn import LLM, Batch, BatchRequest, KVPool, SamplingParams, UnsupportedError, forward_context
from paged_attn.engine.runners.model_watch import ModelChangedError

VOCAB, WIDTH, HEADS, DIM = 61, 32, 4, 8
Scores = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """`scores(self, products, rows, columns)` of [1, heads, T, T] products of queries and keys; not causal yet."""

    def __init__(self, scores: Scores) -> None:
        super().__init__()
        self.scores, self.qkv, self.o = scores, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias, self.temperature = nn.Embedding(32, HEADS), nn.Parameter(torch.tensor(0.35))
        at = torch.arange(1400)
        self.far = nn.Buffer(torch.where(at[:, None] - at > 650, -30.0, 0.0))
        self.block, self.distance = nn.Buffer(at // 640), nn.Buffer((at[:, None] - at).clamp(0, 31))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1])
        scores = self.scores(self, query @ key.mT, at[:, None], at)
        return self.o((scores.masked_fill(at[:, None] < at, float("-inf")).softmax(-1) @ value).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, scores: Scores) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Attention(scores) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def t5(self: Attention, products: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return products * 0.35 + self.bias((rows - columns).clamp(0, 31)).permute(2, 0, 1)


def t5_by_stored_distances(self: Attention, products: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    length = len(columns)
    return products * 0.35 + self.bias(self.distance[:length, :length]).permute(2, 0, 1)


def learned_scale(self: Attention, products: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return products * self.temperature


def far_ones_count_less(self: Attention, products: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return products * 0.35 + self.far[: len(columns), : len(columns)]


def in_stored_blocks(self: Attention, products: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    blocks = self.block[: len(columns)]
    return (products * 0.35).masked_fill(blocks[:, None] != blocks, float("-inf"))


def built(scores: Scores) -> GPT:
    torch.manual_seed(0)
    return GPT(scores).eval()


@torch.no_grad()
def greedy(model: GPT, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def prompts(*lengths: int) -> list[list[int]]:
    return [torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in lengths]


def served(llm: LLM, given: list[list[int]], count: int) -> list[list[int]]:
    return [each.token_ids for each in llm.generate(given, SamplingParams(max_new_tokens=count))]


@pytest.mark.parametrize(("scores", "names"), [(t5, "bias.weight"), (learned_scale, "temperature")])
def test_an_engine_does_not_go_on_with_old_numbers(scores: Scores, names: str) -> None:
    model, given = built(scores), prompts(3, 9, 20)
    with LLM(model, num_pages=40) as llm:
        assert served(llm, given, 6) == [greedy(model, each, 6) for each in given]
        changed = [parameter for name, parameter in model.named_parameters() if name.endswith(names)]
        with torch.no_grad():
            changed[0].mul_(2)
            with pytest.raises(ModelChangedError, match=f"numbers were written into layers.0.{names}, and attention goes on"):
                served(llm, given, 1)
            changed[0].div_(2)
            before, changed[0].data = changed[0].data, changed[0].data * 2
            with pytest.raises(ModelChangedError, match=f"layers.0.{names}"):
                served(llm, given, 1)
            changed[0].data = before.clone()  # the same numbers at another address
            model.head.weight.mul_(-1)
        assert served(llm, given, 6) == [greedy(model, each, 6) for each in given]


def test_nor_does_a_compiled_model_under_a_context() -> None:
    torch._dynamo.reset()
    model, (prompt,) = built(t5), prompts(9)
    compiled: Any = torch.compile(model, backend="paged_attn")
    batch = Batch.build([BatchRequest(prompt, [1], 0)], 16)
    pool = KVPool(paged_attn.attention_layers(compiled), num_pages=4, page_size=16, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(2):
            with forward_context(batch, pool):
                logits = compiled(batch.model_inputs()["input_ids"])
            torch.testing.assert_close(logits[0, :9], model(torch.tensor([prompt]))[0])
            model.head.weight.mul_(2)  # followed
        model.layers[1].bias.weight.data = model.layers[1].bias.weight * 2
        with pytest.raises(UnsupportedError, match="other numbers were written into a tensor that its attention's mask, bias or scale"):
            with forward_context(batch, pool):
                compiled(batch.model_inputs()["input_ids"])


@pytest.mark.parametrize("scores", [far_ones_count_less, t5_by_stored_distances])
def test_a_stored_table_counts_as_far_as_it_reaches(scores: Scores) -> None:
    model, given = built(scores), prompts(7, 900)
    with LLM(model, num_pages=80, self_check=False) as llm:
        assert served(llm, given, 3) == [greedy(model, each, 3) for each in given]


def test_stored_blocks_that_are_longer_than_a_probe_are_seen() -> None:
    """Until 640 tokens such a mask is the causal one. It is of no known family, and recomputed."""
    model, given = built(in_stored_blocks), prompts(7, 700)
    with LLM(model, num_pages=80) as llm:
        assert served(llm, given, 3) == [greedy(model, each, 3) for each in given]
        assert "a mask of no known family" in llm.engine.runner.compiled.rewrite.layers[0].proof  # type: ignore[attr-defined]


def test_grouped_einsum_with_the_group_behind_the_tokens() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
            self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.table(input_ids)
            query, (key, value) = self.q(x).unflatten(-1, (2, 2, DIM)), self.kv(x).unflatten(-1, (2, 2, DIM)).unbind(2)
            later = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)
            weights = (torch.einsum("btgrd,bsgd->bgrts", query, key) * DIM**-0.5 + later).softmax(-1)
            return self.head(torch.einsum("bgrts,bsgd->btgrd", weights, value).flatten(2))

    torch.manual_seed(0)
    model, given = Grouped().eval(), prompts(3, 9, 20)
    with LLM(model, num_pages=40, page_size=4, max_batch_tokens=8) as llm:
        assert [(spec.num_q_heads, spec.num_kv_heads) for spec in llm.engine.runner.layers] == [(4, 2)]
        assert served(llm, given, 6) == [greedy(model, each, 6) for each in given]  # type: ignore[arg-type]


def test_a_scale_of_float64_is_the_nearest_root() -> None:
    def by_root(self: Attention, products: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return products * DIM**-0.5

    model, given = built(by_root).double(), prompts(3, 20)
    with LLM(model, num_pages=40) as llm:
        assert llm.engine.runner.layers[0].scale == pytest.approx(DIM**-0.5, rel=1e-15)
        assert served(llm, given, 6) == [greedy(model, each, 6) for each in given]
