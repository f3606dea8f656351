"""Idioms of reference code (Llama's, nanoGPT's, gpt-fast's, DeepSeek-V3's, OLMo's, lingua's, minimind's), each in a model of two layers
that is served as it is: ragged prompts get the tokens of the model's own greedy loop, and nothing is recomputed in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn import LLM, SamplingParams, UnsupportedError, explain
from paged_attn.engine.model.rows_of_logits import logits_in

WIDTH, HEADS, VOCAB, ROWS = 32, 4, 48, 512
PROMPTS = [list(range(3, 3 + length)) for length in (2, 9, 17)]
NEW = 8


class Reference(nn.Module):
    """Attention is what the subclass makes of q, k and v [1, T, heads, 8]."""

    def __init__(self, vocab: int = VOCAB) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, vocab)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.register_buffer("table", torch.outer(torch.arange(float(ROWS)), torch.tensor([1.0, 0.1, 0.01, 0.001])))

    def hidden(self, idx: Tensor) -> Tensor:
        x = self.embed(idx)
        for layer in self.qkv:
            q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in layer(x).chunk(3, -1))
            x = x + self.attend(q, k, v, x).flatten(2)
        return x

    def forward(self, idx: Tensor) -> Any:
        return self.head(self.hidden(idx))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def upper(tokens: int) -> Tensor:
    return torch.triu(torch.full((tokens, tokens), float("-inf")), diagonal=1)


class TypedMask(Reference):
    """Llama's: a mask of the hidden states' dtype and device."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mask = torch.hstack([torch.zeros((x.shape[1], 0)), upper(x.shape[1])])
        mask = mask.type_as(x) if self.how == "type_as" else mask.to(x)
        return (F.softmax(q @ k.transpose(2, 3) * 8**-0.5 + mask, dim=-1) @ v).transpose(1, 2)


class RowsOfTable(Reference):
    """gpt-fast's: each layer picks rows of the rotary table by an index of its own call."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        angle = self.table[self.rows][:, None]

        def rotated(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

        return super().attend(rotated(q), rotated(k), v, x)

    def hidden(self, idx: Tensor) -> Tensor:
        self.rows = torch.arange(idx.shape[1])
        return super().hidden(idx)


class QueriesFirst(Reference):
    """DeepSeek-V3's: scores of [batch, query, head, key], or other layouts."""

    def __init__(self, layout: str, how: str) -> None:
        super().__init__()
        self.layout, self.how = layout, how

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        scores = torch.einsum(f"bshd,bthd->{self.layout}", q, k) * 8**-0.5
        dims = {"bsht": (1, 3), "bsth": (1, 2), "shbt": (0, 3)}[self.layout]
        shape = [x.shape[1] if axis in dims else 1 for axis in range(4)]
        if self.how == "in place":
            scores += upper(x.shape[1]).view(shape)
        elif self.how == "added":
            scores = scores + upper(x.shape[1]).view(shape)
        else:
            scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1).view(shape), float("-inf"))
        weights = scores.softmax(dims[1], dtype=torch.float32).type_as(x)
        return torch.einsum(f"{self.layout},bthd->bshd", weights, v)


class KeptBias(Reference):
    """OLMo's: a bias that is made anew for a longer call, and kept."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}
        if kept:
            self.bias(kept)

    def bias(self, tokens: int) -> Tensor:
        if (known := self.cache.get("bias")) is not None and known.shape[-1] >= tokens:
            return known
        position = torch.arange(1 - tokens, 1, dtype=torch.float)
        self.cache["bias"] = (position.view(1, 1, 1, -1) - position.view(1, 1, -1, 1)).abs() * -0.1 + upper(tokens)
        return self.cache["bias"]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        tokens = x.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(tokens)[:, :, :tokens, :tokens]).transpose(1, 2)


class ViewOfItself(Reference):
    """lingua's: `x.view_as(x)`, which reads x and its shape."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return super().attend(q.view_as(q), k.expand_as(k), v.type_as(v), x)


class LastTokenUnlessTrained(Reference):
    """nanoGPT's and llama2.c's: the logits of all tokens where it is given targets."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        x = self.hidden(idx)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        self.last_loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, self.last_loss


MODELS: dict[str, Any] = {
    "type_as": lambda: TypedMask("type_as"),
    "to": lambda: TypedMask("to"),
    "rows of a table": RowsOfTable,
    "bsht in place": lambda: QueriesFirst("bsht", "in place"),
    "bsht added": lambda: QueriesFirst("bsht", "added"),
    "bsth filled": lambda: QueriesFirst("bsth", "filled"),
    "shbt added": lambda: QueriesFirst("shbt", "added"),
    "a bias that is kept": lambda: KeptBias(0),
    "a bias that was kept": lambda: KeptBias(256),
    "targets": LastTokenUnlessTrained,
    "views of themselves": ViewOfItself,
    "a padded table": lambda: Reference(VOCAB - 5),
}


class LastTokenAlone(Reference):
    """DeepSeek-V3's: for generation alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm = how, nn.LayerNorm(WIDTH)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.hidden(idx)
        logits: Tensor = {
            "x[:, -1]": lambda: self.head(self.norm(x)[:, -1]),
            "x[:, [-1]]": lambda: self.head(self.norm(x[:, [-1], :])).float() * 2,
            "x[:, -1:]": lambda: torch.tanh(self.head(x[:, -1:]) / 30) * 30,
            "logits[:, -1]": lambda: self.head(self.norm(x))[:, -1, :],
        }[self.how]()
        return logits


class OtherWithTargets(LastTokenUnlessTrained):
    """What it gives in training is not an answer."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        return super().forward(idx if targets is None else idx.flip(1), targets)


MODELS |= {how: (lambda how=how: LastTokenAlone(how)) for how in ("x[:, -1]", "x[:, [-1]]", "x[:, -1:]", "logits[:, -1]")}
MODELS["other logits with targets"] = OtherWithTargets


@torch.no_grad()
def own_tokens(model: nn.Module, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(logits_in(model(torch.tensor([ids]))).flatten(0, -2)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
def test_it_is_served_as_it_is(name: str) -> None:
    expected = [own_tokens(MODELS[name]().eval(), prompt) for prompt in PROMPTS]
    with LLM(MODELS[name]().eval(), num_pages=64, page_size=4, max_batch_tokens=16) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert [each.token_ids for each in llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))] == expected
        assert "recomputed" not in explain(llm)


class MeanOfAll(Reference):
    def forward(self, idx: Tensor) -> Any:
        return self.head(self.hidden(idx).mean(1))


def test_logits_of_more_than_the_last_row_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"not made of the last row of something, as head\(x\[:, -1\]\) is: mean"):
        LLM(MeanOfAll().eval(), num_pages=20)


class Branching(Reference):
    """minimind's: a branch on a buffer, which always goes one way, in a module that is given and returns more than tensors."""

    def forward(self, idx: Tensor, cache: Any = None) -> Any:
        if self.table[1, 0] == 0:
            self.table.fill_(1.0)
        return self.hidden(idx), cache


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Branching()

    def forward(self, idx: Tensor) -> Tensor:
        hidden: Tensor = self.body.head(self.body(idx, None)[0])
        return hidden


def test_a_branch_on_a_tensor_is_named_by_its_line() -> None:
    words = r"Branching cannot be traced, as it branches .* at .*test_reference_code.py:\d+ \(`if self.table\[1, 0\] == 0:`\)"
    with pytest.raises(UnsupportedError, match=words):
        LLM(Whole().eval(), num_pages=20)
