"""What remote code gives modules with state besides a row per token: a mask for all layers alike, places in the cache, decays."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from paged_attn import LLM, SamplingParams
from paged_attn.recurrent.discover import find_recurrent_layers
from paged_attn.recurrent.watching.call_parts import NotDriven

VOCAB, WIDTH = 40, 16


class States(DynamicCache):
    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, Tensor] = {}


class Mixer(nn.Module):
    """h_t = decay * h_{t-1} + x_t; subclasses are given something else, or read it otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: States | None, mask: Tensor, places: Tensor, decays: Tensor) -> Tensor:
        state = cache.states.get(0) if cache is not None else None
        state = self.start(state, x, mask, places)
        outputs = []
        for token in self.into(x).unbind(1):
            state = self.decay(decays) * state + token
            outputs.append(state)
        if cache is not None:
            cache.states[0] = state
        return self.out(torch.stack(outputs, 1).tanh())

    def start(self, state: Tensor | None, x: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        return torch.zeros_like(x[:, 0]) if state is None else state

    def decay(self, decays: Tensor) -> Any:
        return 0.5


class Decays(Mixer):
    def decay(self, decays: Tensor) -> Tensor:
        return decays


class ByPlace(Mixer):
    """As Mamba's mixers were in transformers: with a state, one token at a time, and the first place says whether there is one."""

    def start(self, state: Tensor | None, x: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        if state is None or places[0] == 0:
            return torch.zeros_like(x[:, 0])
        assert x.shape[1] == 1
        return state


class ScaledLate(Mixer):
    """Reads its places token by token, and they make a difference from 100 on."""

    def forward(self, x: Tensor, cache: States | None, mask: Tensor, places: Tensor, decays: Tensor) -> Tensor:
        return super().forward(x, cache, mask, places, decays) * torch.where(places >= 100, 4.0, 1.0)[:, None]


class ReadsMask(Mixer):
    def start(self, state: Tensor | None, x: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        return super().start(state, x, mask, places) + mask[..., -1, -1]


class NeedsMaskLater(Mixer):
    def start(self, state: Tensor | None, x: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        return super().start(None if mask is None else state, x, mask, places)


class Model(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, mixer: type[Mixer]) -> None:
        super().__init__(PretrainedConfig(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=1, max_position_embeddings=128))
        torch.manual_seed(0)
        self.embed, self.mixer, self.head = nn.Embedding(VOCAB, WIDTH), mixer(), nn.Linear(WIDTH, VOCAB, bias=False)
        self.decays = nn.Parameter(torch.linspace(0.2, 0.9, WIDTH))
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False, **_: Any) -> CausalLMOutputWithPast:
        cache = States() if use_cache and past_key_values is None else past_key_values
        x, tokens = self.embed(input_ids), input_ids.shape[1]
        mask = torch.full((tokens, tokens), torch.finfo(x.dtype).min).triu(1)[None, None]
        x = x + self.mixer(x, cache, mask, torch.arange(tokens), self.decays * 0.9)
        return CausalLMOutputWithPast(logits=self.head(x), past_key_values=cache)


def inputs_of(length: int) -> dict[str, Any]:
    return {"input_ids": torch.arange(length)[None] % 7}


@pytest.mark.parametrize(("mixer", "chunks"), [(Mixer, True), (Decays, True), (ByPlace, False)])
@pytest.mark.parametrize("self_check", [True, False])
def test_tokens_are_the_models_own(mixer: type[Mixer], chunks: bool, self_check: bool) -> None:
    prompts = [[(7 * i + n) % VOCAB for i in range(n)] for n in (1, 2, 9, 40)]
    expected = [greedy(Model(mixer), prompt, 5) for prompt in prompts]
    with LLM(Model(mixer), self_check=self_check, max_batch_tokens=16, prefix_cache=False) as llm:
        (layer,) = llm.engine.runner.recurrent
        assert (layer.chunks, layer.batches) == (chunks, True)
        answers = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0))
        assert [list(each.token_ids) for each in answers] == expected


def test_places_that_make_a_difference_are_each_requests_own() -> None:
    prompts = [[(3 * n) % VOCAB for n in range(length)] for length in (4, 110)]
    with LLM(Model(ScaledLate), self_check=False) as llm:
        assert llm.engine.runner.recurrent[0].mapped
        answers = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0))
        assert [list(each.token_ids) for each in answers] == [greedy(Model(ScaledLate), prompt, 5) for prompt in prompts]


def test_decays_that_are_made_of_weights_are_followed() -> None:
    model = Model(Decays)
    with LLM(model, prefix_cache=False) as llm:
        with torch.no_grad():
            model.decays.mul_(-1)
        (answer,) = llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=5, temperature=0))
        assert list(answer.token_ids) == greedy(model, [1, 2, 3, 4], 5)


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (ReadsMask, r"it is given mask of shape \[1, 1, 11, 11\] for 11 tokens and \[1, 1, 3, 3\] for 3, and needs it"),
        (NeedsMaskLater, "it may need mask, which has no row per token"),
    ],
)
def test_a_mask_that_is_read_keeps_a_module_from_being_driven(mixer: type[Mixer], words: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotDriven, match=words):
        find_recurrent_layers(Model(mixer), inputs_of)
    with LLM(Model(mixer), self_check=False) as llm:  # on all tokens, and the log says why
        (answer,) = llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=5, temperature=0))
        assert list(answer.token_ids) == greedy(Model(mixer), [1, 2, 3, 4], 5)
    assert re.search(rf"all tokens of a request run through mixer, .* \(mixer keeps recurrent state, and {words}", caplog.text)


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
