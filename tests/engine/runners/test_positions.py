"""Models that make their positions themselves, end to end: token for token, ragged, in chunks; their limits; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paged_attn import LLM, Batch, BatchRequest, KVPool, SamplingParams, UnsupportedError, attention_layers, forward_context
from paged_attn.engine.runners import traced_runner
from paged_attn.engine.runners.traced_runner import TracedRunner
from tests.engine.runners.own_positions import PLACES, POSITIONS, Decoder, greedy_loop
from tests.oracle import greedy, random_prompts
from tests.tiny_models import COMMON, build

PROMPTS = random_prompts((1, 5, 17, 33, 70))
NEW_TOKENS = 12
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)
DECODERS = ("bart", "blenderbot", "marian", "mbart", "plbart")
RUNNING_SUMS = ("roberta", "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")


def hf(name: str) -> PreTrainedModel:
    """The decoder of an encoder-decoder type alone, or an encoder type that generates."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "init_std": 0.2}
    sizes |= {"languages": ("en_XX", "de_DE"), "default_language": "de_DE"} if name == "xmod" else {}  # an adapter for each
    config = AutoConfig.for_model(name, **{**COMMON, **sizes, "forced_eos_token_id": None, "tie_word_embeddings": False})
    config.is_decoder, config.is_encoder_decoder = True, False
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def assert_serves(model: nn.Module, expected: list[list[int]]) -> LLM:
    for page_size in (1, 16):
        llm = LLM(model, page_size=page_size, max_batch_tokens=16, num_pages=400)
        for cache in ("cold", "warm"):
            assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected, f"page size {page_size}, {cache}"
    return llm


def test_a_full_device_is_no_other_way_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused model would be traced a second time, without positions."""
    runner = LLM(build("llama"), num_pages=8).engine.runner
    assert isinstance(runner, TracedRunner)

    def no_room(model: nn.Module, prompt: Tensor, positions: bool) -> Tensor:
        if positions:
            raise torch.OutOfMemoryError("no room")
        return torch.zeros(len(prompt), 96)

    monkeypatch.setattr(traced_runner, "rows_of_logits", no_room)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        runner._counts_otherwise(UnsupportedError("refused"))


@pytest.mark.parametrize("name", PLACES)
def test_a_plain_module_with_positions_of_its_own(name: str) -> None:
    place, limit = PLACES[name]
    model = Decoder(place).eval()
    llm = assert_serves(model, [greedy_loop(model, prompt, NEW_TOKENS) for prompt in PROMPTS])
    assert llm.engine.limits.max_positions == limit


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_that_takes_no_position_ids(name: str) -> None:
    model = hf(name)
    expected = [greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert expected == [greedy_loop(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert_serves(model, expected)


def test_the_prompts_show_wrong_positions() -> None:
    """A negative control: positions that go on across a row would change tokens."""
    model = Decoder(PLACES["learned"][0]).eval()
    shifted = Decoder(lambda m, x: x + m.learned(torch.arange(x.shape[1]) + 1)).eval()
    assert all(greedy_loop(model, p, NEW_TOKENS) != greedy_loop(shifted, p, NEW_TOKENS) for p in PROMPTS)


@pytest.mark.parametrize("name", [name for name, (_, limit) in PLACES.items() if limit is not None])
def test_a_prompt_beyond_the_tables_is_refused_before_it_runs(name: str) -> None:
    place, limit = PLACES[name]
    assert limit is not None
    model = Decoder(place).eval()
    llm = LLM(model, num_pages=40)
    with pytest.raises(ValueError, match=f"too long: {limit + 1} tokens > {limit}, the model's positions; shorten it by 1"):
        llm.generate([[1] * (limit + 1)], GREEDY)
    (longest,) = llm.generate([[1] * limit], GREEDY)
    assert longest.finish_reason == "length" and longest.token_ids == greedy_loop(model, [1] * limit, 1)
    (near,) = llm.generate([[1] * (limit - 3)], GREEDY)
    assert near.token_ids == greedy_loop(model, [1] * (limit - 3), 4)


def test_a_row_holds_no_more_tokens_than_were_traced() -> None:
    """Beyond the model's own limit on T nothing is known of its code, though each request is short."""
    model = Decoder(PLACES["stored"][0]).eval()
    llm = LLM(model, num_pages=40)
    assert llm.engine.config.max_batch_tokens == POSITIONS
    prompts = random_prompts((60, 60, 60))
    assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == [greedy_loop(model, p, NEW_TOKENS) for p in prompts]


@pytest.mark.parametrize("name", RUNNING_SUMS)
def test_where_generate_and_a_plain_call_number_positions_differently_the_reason_is_told(name: str) -> None:
    model = hf(name)
    prompt = random_prompts((17,))[0]
    assert greedy(model, prompt, 8) != greedy_loop(model, prompt, 8)  # what the message says is true
    with pytest.raises(UnsupportedError, match=r"without position_ids gives other logits .* generate\(\) and a plain call .* disagree"):
        LLM(model, num_pages=40)
    with LLM(model, num_pages=100, max_batch_tokens=16, follow_generate=True) as llm:
        prompts = random_prompts((1, 5, 17))
        got = [c.token_ids for c in llm.generate(prompts, SamplingParams(max_new_tokens=8))]
    assert got == [greedy(model, p, 8) for p in prompts]


class Refused(Decoder):
    """Takes position_ids and says that it generates by them, but is made from the number of tokens, too."""

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, None]:  # type: ignore[override]
        positions = torch.arange(2, tokens.shape[1] + 2)[None] if position_ids is None else position_ids
        self.place = lambda m, x: (x + m.learned(positions)) * (x.shape[1] / 10)
        return super().forward(tokens)

    def generate(self) -> None: ...


def test_who_follows_generate_is_told_the_true_reason_and_not_to_follow_it() -> None:
    model = Refused(PLACES["none"][0]).eval()
    with pytest.raises(UnsupportedError, match="follow_generate=True"):
        LLM(model, num_pages=40)
    with pytest.raises(UnsupportedError, match="truediv is made from the number of tokens") as told:
        LLM(model, num_pages=40, follow_generate=True)
    assert "follow_generate" not in str(told.value)


class Optional(Decoder):
    """Takes position_ids, and numbers positions from 2 if it is given none."""

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, None]:  # type: ignore[override]
        positions = torch.arange(2, tokens.shape[1] + 2)[None] if position_ids is None else position_ids
        self.place = lambda m, x: x + m.learned(positions)
        return super().forward(tokens)


def test_a_module_that_numbers_otherwise_when_given_none_is_served_as_it_is_called() -> None:
    model = Optional(PLACES["none"][0]).eval()
    llm = assert_serves(model, [greedy_loop(model, prompt, NEW_TOKENS) for prompt in PROMPTS])
    assert llm.engine.limits.max_positions == POSITIONS - 2


REFUSED: dict[str, tuple[Any, str]] = {
    "a running sum over tokens": (lambda m, x: x + m.learned((x[..., 0] > 0).cumsum(1)), "cumsum mixes tokens"),
    "from the end": (lambda m, x: x + m.learned(torch.arange(x.shape[1]).flip(0)), "made from the number of tokens"),
    "the length": (lambda m, x: x * (x.shape[1] / 10), "truediv is made from the number of tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_function_of_positions_is_refused(name: str) -> None:
    place, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=words):
        LLM(Decoder(place).eval(), num_pages=40)


class CountsTokens(Decoder):
    def forward(self, idx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        self.place = lambda m, x: x + m.learned((idx != 0).cumsum(1))
        return super().forward(idx)


def test_positions_counted_from_the_tokens_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"made of token ids, and a row.s value also depends on the ids of other rows"):
        LLM(CountsTokens(PLACES["none"][0]).eval(), num_pages=40)


class Needs(Decoder):
    def forward(self, idx: Tensor, mask: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(idx)


def test_a_forward_that_needs_more_than_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Needs\.forward needs mask besides idx"):
        LLM(Needs(PLACES["none"][0]), num_pages=40)


@pytest.mark.parametrize("name", ["learned", "stored", "sinusoidal"])
def test_the_compiled_module_runs_batches_of_tokens_alone(name: str) -> None:
    model = Decoder(PLACES[name][0]).eval()
    compiled = torch.compile(model, backend="paged_attn")
    pool = KVPool(attention_layers(compiled), 8, 16, torch.float32)
    prompts = random_prompts((5, 17))
    batch = Batch.build([BatchRequest(prompts[0], [1]), BatchRequest(prompts[1], [2, 3])], 16)
    with torch.no_grad():
        with forward_context(batch, pool):
            logits = compiled(batch.model_inputs()["input_ids"])[0][0, batch.logits_rows]
        for row, prompt in zip(logits, prompts, strict=True):
            torch.testing.assert_close(row, model(torch.tensor([prompt]))[0][0, -1], rtol=1e-4, atol=1e-5)
        alone = torch.tensor([prompts[1]])
        assert torch.equal(compiled(alone)[0], model(alone)[0])  # a drop-in outside the context


def test_the_compiled_decoder_takes_what_the_batch_gives() -> None:
    model = hf("bart")
    compiled = torch.compile(model, backend="paged_attn")
    pool = KVPool(attention_layers(compiled), 8, 16, torch.float32)
    prompts = random_prompts((5, 17))
    batch = Batch.build([BatchRequest(prompts[0], [1]), BatchRequest(prompts[1], [2, 3])], 16)
    with torch.no_grad(), forward_context(batch, pool):
        logits = compiled(**batch.model_inputs()).logits[0, batch.logits_rows]
    assert logits.argmax(-1).tolist() == [greedy(model, prompt, 1)[0] for prompt in prompts]


def test_the_positions_op_splits_the_graph_as_attention_does() -> None:
    model = Decoder(PLACES["learned"][0]).eval()
    graph = LLM(model, num_pages=40).engine.runner.compiled
    assert graph.split is not None and len(graph.split.breaks) == 2


class Random(Decoder):
    """Starts from random numbers, as recurrent-depth models do."""

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, None]:  # type: ignore[override]
        self.place = lambda m, x: x + torch.randn_like(x)
        return super().forward(tokens)

    def generate(self) -> None: ...


def test_random_numbers_are_no_other_way_to_number_positions() -> None:
    with pytest.raises(UnsupportedError, match="randn_like is made from the number of tokens and differs from row to row"):
        LLM(Random(PLACES["none"][0]).eval(), num_pages=40)
