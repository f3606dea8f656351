"""Modules that mix tokens in a way of their own run as they are, on all tokens of a request, and the rest of the model is captured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from paged_attn import LLM, SamplingParams, UnsupportedError
from paged_attn.attn_ops.ops.module import MODULE_ON_ALL_TOKENS, register_module
from paged_attn.attn_ops.specs.recompute import RecomputeSpec
from tests.engine.runners.own_positions import greedy_loop
from tests.oracle import random_prompts
from tests.zoo.build import build
from tests.zoo.configs import TYPES

WINDOW, WIDTH = 4, 32
Mixer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def two_products(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Scores of contents and of places, which are added, the latter as much as the query says."""
    places = torch.cos(positions.float()[..., None] * torch.arange(WIDTH))
    return ((q @ k.mT + q[..., :1] * ((q + 1) @ places.mT)) * 0.2).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def windows(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Each complete window of four tokens is one key and value more; where there is none, the code is another."""
    count = k.shape[1] // WINDOW
    scores, values = q @ k.mT, v
    if count > 0:
        pooled = [each[:, : count * WINDOW].unflatten(1, (count, WINDOW)).amax(2) for each in (k, v)]
        ready = (positions + 1)[..., None] // WINDOW > torch.arange(count)
        mask = torch.cat([mask.expand(q.shape[0], -1, -1), ready], -1)
        scores, values = torch.cat([scores, q @ pooled[0].mT], -1), torch.cat([v, pooled[1]], 1)
    return (scores * 0.2).masked_fill(~mask, float("-inf")).softmax(-1) @ values


def of_queries(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Scores by the query's position."""
    scores = (q @ k.mT) * torch.log(positions + 3.0)[..., None] * 0.1
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def of_the_largest(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Small weights are left out, and the others stretched."""
    weights = ((q @ k.mT) * 0.2).masked_fill(~mask, float("-inf")).softmax(-1)
    kept = weights.where(weights >= weights.amax(-1, keepdim=True) * 0.3, 0.0)
    return kept / kept.sum(-1, keepdim=True) @ v


def of_tokens_before(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Keys and values are mixed with those of a token long before, and nothing keeps these."""
    k, v = (each + torch.nn.functional.pad(each, (0, 0, 20, 0))[:, :-20] for each in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], mask)[:, 0]


def of_running_sums(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Linear attention, without a state: no token meets another one in a product."""
    q, k = q.exp(), k.exp()
    return q * (k * v).cumsum(1) / (q * k.cumsum(1)).sum(-1, keepdim=True)


def of_a_long_filter(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """A convolution as long as the call, by Fourier transforms: that of the filter has no row for each token."""
    length = q.shape[1]
    filters = torch.cos(torch.arange(256.0)[:, None] * torch.arange(WIDTH)) / torch.arange(1.0, 257.0)[:, None]
    products = torch.fft.rfft(k * v, n=2 * length, dim=1) * torch.fft.rfft(filters[:length], n=2 * length, dim=0)
    return q * torch.fft.irfft(products, n=2 * length, dim=1)[:, :length]


def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.2).masked_fill(~mask, float("-inf")).softmax(-1) @ v


class Indexer(nn.Module):
    """Which keys a query may see, by a loop over what the data chooses."""

    def forward(self, k: Tensor, mask: Tensor) -> Tensor:
        allowed = mask.clone()
        for row in (k[0].sum(-1) > 0).nonzero()[:, 0]:
            allowed[row + 1 :, row] = False
        return allowed


class Notes:
    """What a layer returns beside its rows, and its caller writes to."""

    of = ""


class Attention(nn.Module):
    def __init__(self, mix: Mixer, indexed: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mix
        self.indexer = Indexer() if indexed else None

    def forward(self, hidden: Tensor, where: dict[str, Any], scale: float = 1.0) -> tuple[Tensor, None, Notes]:
        q, k, v = self.qkv(hidden).chunk(3, -1)
        mask = where["mask"] if self.indexer is None else self.indexer(k, where["mask"])
        return self.out(self.mix(q, k, v, where["positions"], mask)) * scale, None, Notes()


class OtherAttention(Attention):
    """Modules of one class run in the same way."""


class Model(nn.Module):
    def __init__(self, mix: Mixer = two_products, indexed: bool = False, **given: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions, self.head = nn.Embedding(96, WIDTH), nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 96)
        self.layers, self.given = nn.ModuleList(Attention(mix, indexed) for _ in range(2)), given

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(position_ids)
        mask = position_ids[0, :, None] >= position_ids[0]
        for layer in self.layers:
            rows, _, notes = layer(x * 2, where={"mask": mask, "positions": position_ids}, **self.given)
            notes.of = "attention"
            x = x + rows
        return self.head(x)


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([ids]), position_ids=torch.arange(len(ids))[None])
        ids.append(int(getattr(logits, "logits", logits)[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("mix", "indexed"),
    [(two_products, False), (windows, False), (windows, True), (of_queries, False), (of_the_largest, False), (of_tokens_before, False),
     (of_running_sums, False)],
)  # fmt: skip
def test_tokens_are_the_models_own(mix: Mixer, indexed: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, prompts = Model(mix, indexed).eval(), random_prompts((1, 5, 17, 33))
    with torch.no_grad(), caplog.at_level(logging.WARNING, "paged_attn"):
        expected = [greedy(model, prompt, 8) for prompt in prompts]
        for settings in ({"page_size": 1, "num_pages": 60}, {"page_size": 16, "num_pages": 20}):
            with LLM(model, max_batch_tokens=16, **settings) as llm:
                for _ in ("cold", "warm"):
                    assert [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8))] == expected
                layers = llm.engine.runner.compiled.rewrite.layers
            assert [layer.spec.module for layer in layers] == ["layers.0", "layers.1"]
            assert all(isinstance(layer.spec, RecomputeSpec) and layer.found_by == "a module that mixes tokens" for layer in layers)
            assert layers[0].proof.startswith("a module that mixes tokens in a way of its own: recomputed from each request's history")
    assert "layers.0, layers.1, which mix them in ways of their own: a token costs more" in caplog.text
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


def test_weights_of_today_are_used() -> None:
    model, prompts = Model().eval(), random_prompts((9,))
    with torch.no_grad(), LLM(model, num_pages=64) as llm:
        before = llm.generate(prompts, SamplingParams(max_new_tokens=8))[0].token_ids
        model.layers[1].out.weight.mul_(-3)
        llm.clear_prefix_cache()
        after = llm.generate(prompts, SamplingParams(max_new_tokens=8))[0].token_ids
        assert before != after == greedy(model, prompts[0], 8)


def check_beside_an_attention(model: Model, own: Callable[[Model, list[int], int], list[int]]) -> None:
    """Its first layer runs on all tokens, and the second, an attention of another kind, on pages: the model's `own` tokens."""
    prompts = random_prompts((1, 5, 17, 33))
    model.layers[1] = OtherAttention(attention)
    with torch.no_grad(), LLM(model, max_batch_tokens=16, num_pages=20) as llm:
        assert [isinstance(layer.spec, RecomputeSpec) for layer in llm.engine.runner.compiled.rewrite.layers] == [True, False]
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8))]
        assert got == [own(model, prompt, 8) for prompt in prompts]


def test_what_is_made_of_the_length_beside_an_attention() -> None:
    check_beside_an_attention(Model(of_a_long_filter).eval(), greedy)


def with_a_zero_key(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """One key that belongs to no token."""
    k, v, mask = (torch.nn.functional.pad(each, given) for each, given in ((k, (0, 0, 1, 0)), (v, (0, 0, 1, 0)), (mask, (1, 0))))
    mask[:, 0] = True
    return torch.nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], mask)[:, 0]


class Positionless(Model):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, torch.arange(input_ids.shape[1])[None])


@pytest.mark.parametrize("mix", [of_a_long_filter, with_a_zero_key])
def test_modules_of_a_model_without_position_ids(mix: Mixer) -> None:
    check_beside_an_attention(Positionless(mix).eval(), greedy_loop)


class Canon(nn.Conv1d):
    """A convolution over a token and the three before it, beside the token itself; no cache keeps these."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.mT)[..., : x.shape[1]].mT


class WithCanon(Model):
    def __init__(self) -> None:
        super().__init__(attention)
        self.canon = nn.ModuleList(Canon() for _ in range(2))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(position_ids)
        mask = position_ids[0, :, None] >= position_ids[0]
        for canon, layer in zip(self.canon, self.layers, strict=True):
            x = x + layer(canon(x), where={"mask": mask, "positions": position_ids})[0]
        return self.head(x)


def test_a_convolution_runs_on_a_few_tokens(caplog: pytest.LogCaptureFixture) -> None:
    model, prompts = WithCanon().eval(), random_prompts((1, 2, 5, 17, 33))
    with torch.no_grad(), caplog.at_level(logging.WARNING, "paged_attn"):
        expected = [greedy(model, prompt, 8) for prompt in prompts]
        for settings in ({"page_size": 1, "num_pages": 120}, {"page_size": 16, "num_pages": 20}):
            with LLM(model, max_batch_tokens=16, **settings) as llm:
                specs = [layer.spec for layer in llm.engine.runner.compiled.rewrite.layers]
                assert [spec.reach for spec in specs if isinstance(spec, RecomputeSpec)] == [3, 3] and len(specs) == 4
                for _ in ("cold", "warm"):
                    assert [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8))] == expected
    assert "a token costs more the later it comes" not in caplog.text


class CanonByPlace(Canon):
    """As strong as a table says."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("strength", torch.ones(1024, dtype=dtype))

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        places = torch.arange(x.shape[1])[None] if position_ids is None else position_ids
        return x + nn.Conv1d.forward(self, x.mT)[..., : x.shape[1]].mT * self.strength[places][..., None]


class WithCanonByPlace(WithCanon):
    def __init__(self, given: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.positions, self.given = nn.Embedding(1024, WIDTH), given
        self.canon = nn.ModuleList(CanonByPlace(dtype) for _ in range(2))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(position_ids)
        mask = position_ids[0, :, None] >= position_ids[0]
        for canon, layer in zip(self.canon, self.layers, strict=True):
            x = x + layer(canon(x, position_ids) if self.given else canon(x), where={"mask": mask, "positions": position_ids})[0]
        return self.head(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("given", [False, True])
def test_a_convolution_with_a_table_of_places_runs_on_all_tokens(given: bool, dtype: torch.dtype) -> None:
    """Its entries are alike for more tokens than are tried, and no code names that number."""
    model, (prompt,) = WithCanonByPlace(given, dtype).eval(), random_prompts((410,))
    for canon in model.canon:
        canon.strength[400:] = -3
    with torch.no_grad(), LLM(model, num_pages=64) as llm:
        assert [c.token_ids for c in llm.generate([prompt], SamplingParams(max_new_tokens=6))] == [greedy(model, prompt, 6)]


def seen_late(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Right for short calls; from 128 tokens on an entry is seen before its window is complete."""
    places = torch.cos(positions.float()[..., None] * torch.arange(WIDTH))
    early = mask | (torch.arange(k.shape[1]) == 127)
    return ((q @ k.mT + q[..., :1] * ((q + 1) @ places.mT)) * 0.2).masked_fill(~early, float("-inf")).softmax(-1) @ v


def test_a_later_token_that_changes_an_earlier_one_only_in_long_calls_is_seen() -> None:
    with pytest.raises(UnsupportedError, match=r"layer at layers.0: a module that mixes .* a later token changes the result of an earlier"):
        LLM(Model(seen_late).eval(), num_pages=64)


FROM = 700


def otherwise_in_long_calls(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    return two_products(q, k, v, positions, mask) * (2 if k.shape[1] > FROM else 1)


def test_a_length_that_code_of_its_own_names_is_tried() -> None:
    with pytest.raises(UnsupportedError, match=r"layer at layers.0: a module that mixes .* a later token changes the result of an earlier"):
        LLM(Model(otherwise_in_long_calls).eval(), num_pages=64)


def by_the_length(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Sharper in calls that are longer than those of its training."""
    return two_products(q * torch.tensor(k.shape[1] / 4096).clamp(min=1), k, v, positions, mask)


def test_requests_end_where_no_proof_can_try_what_code_names(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(by_the_length).eval()
    model.positions = nn.Embedding(5000, WIDTH)
    with caplog.at_level(logging.WARNING, "paged_attn"), LLM(model, num_pages=300) as llm:
        assert llm.engine.limits.max_positions == 4095
    assert "layers.1: a module that mixes tokens in a way of its own: requests end at 4095 tokens, as its code holds" in caplog.text


def of_a_table(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """As the first, with keys by a table that ends at 64 positions."""
    return two_products(q, k + torch.linspace(-1, 1, 64 * WIDTH).view(64, WIDTH)[: k.shape[1]], v, positions, mask)


def test_a_module_with_fewer_positions_than_the_proofs_have_tokens() -> None:
    model, prompts = Model(of_a_table).eval(), random_prompts((5, 33))
    model.config = PretrainedConfig(max_position_embeddings=64)  # type: ignore[assignment]
    with torch.no_grad(), LLM(model, num_pages=20) as llm:
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8))]
        assert got == [greedy(model, prompt, 8) for prompt in prompts]


class CountsItsCall(Model):
    """Its attention is told how many tokens there are, as a number."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.given = {"scale": float(input_ids.shape[1])}
        return super().forward(input_ids, position_ids)


def test_what_is_called_in_more_ways_than_one_stays_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"layer at layers.0: attention that is written out .* its scores are the sum of 2 products"):
        LLM(CountsItsCall().eval(), num_pages=64)


class InAList(Model):
    """Its layers are not modules of its own, so that the path of an attention leads nowhere."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(self.layers)
        del self.layers
        self.__dict__["layers"] = layers


def test_a_path_that_leads_to_no_module_stays_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"attention that is written out .* its scores are the sum of 2 products"):
        LLM(InAList().eval(), num_pages=64)


@pytest.mark.skipif("deepseek_v4" not in TYPES, reason="this transformers has no deepseek_v4")
def test_compressed_entries_that_grow_with_the_tokens() -> None:
    model, prompts = build("deepseek_v4"), random_prompts((1, 6, 21))
    with torch.no_grad(), LLM(model, max_batch_tokens=16, num_pages=64) as llm:
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))]
        assert got == [greedy(model, prompt, 8) for prompt in prompts]


def test_opcheck() -> None:
    module = nn.Linear(4, 4)
    given = ([torch.randn(1, 3, 4)], 0, register_module(module, lambda m, values: m(*values)))
    torch.library.opcheck(MODULE_ON_ALL_TOKENS, given, test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(MODULE_ON_ALL_TOKENS(*given), module(given[0][0])[:, None])
