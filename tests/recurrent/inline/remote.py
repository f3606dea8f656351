"""Models as remote code writes them, with one layer whose recurrence is written inline, in a loop over tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from paged_attn import LLM, Completion, SamplingParams

VOCAB, WIDTH, HEADS, KEYS, VALUES = 40, 24, 3, 4, 6


class States(DynamicCache):
    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, Any] = {}


class Mixer(nn.Module):
    """A loop over tokens of `token`, which subclasses write."""

    state: tuple[int, ...] = (HEADS, KEYS, VALUES)

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.q, self.k = (nn.Linear(WIDTH, HEADS * KEYS, bias=False) for _ in range(2))
        self.v, self.gate, self.out = nn.Linear(WIDTH, HEADS * VALUES), nn.Linear(WIDTH, HEADS * VALUES), nn.Linear(HEADS * VALUES, WIDTH)

    def forward(self, x: Tensor, cache: States | None) -> Tensor:
        batch = x.shape[0]
        state = cache.states.get(self.layer_idx) if cache is not None else None
        if state is None:
            state = x.new_zeros(batch, *self.state)
        outputs = []
        for row in x.unbind(1):
            output, state = self.token(row, state)
            outputs.append(output)
        if cache is not None:
            cache.states[self.layer_idx] = state
        return self.out(torch.stack(outputs, 1) * F.silu(self.gate(x)))

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """row [batch, WIDTH], state [batch, ...] -> [batch, HEADS * VALUES], the new state"""
        raise NotImplementedError

    def heads(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (linear(row).unflatten(-1, (HEADS, KEYS)) for linear in (self.q, self.k))
        return q * KEYS**-0.5, k, self.v(row).unflatten(-1, (HEADS, VALUES))


class Retention(Mixer):
    """RetNet's: a constant decay for each head."""

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.register_buffer("decay", 1 - 2.0 ** (-2.0 - torch.arange(HEADS)))

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(row)
        state = state * self.decay[:, None, None] + k.unsqueeze(-1) * v.unsqueeze(-2)
        return (q.unsqueeze(-1) * state).sum(-2).flatten(1), state


class Transposed(Retention):
    """Keeps values by keys, and multiplies with einsum."""

    state = (HEADS, VALUES, KEYS)

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(row)
        state = self.decay.view(1, -1, 1, 1) * state + torch.einsum("bhv,bhk->bhvk", v, k)
        return torch.einsum("bhvk,bhk->bhv", state, q).reshape(len(row), -1), state


class Flat(Retention):
    """Keeps its state in one dimension."""

    state = (HEADS * KEYS * VALUES,)

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, state = super().token(row, state.view(len(row), HEADS, KEYS, VALUES))
        return output, state.flatten(1)


class Gated(Mixer):
    """Gated linear attention: a computed decay for each channel of the keys."""

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.decays = nn.Linear(WIDTH, HEADS * KEYS)

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(row)
        decay = (F.logsigmoid(self.decays(row)) / 4).exp().view(-1, HEADS, KEYS)
        state = state * decay[..., None] + k[..., None] @ v[..., None, :]
        return (q[:, :, None] @ state)[:, :, 0].flatten(1), state


class Selective(Mixer):
    """Mamba-2's: one computed decay for each head, keys and queries for all heads alike."""

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.step, self.rate = nn.Linear(WIDTH, HEADS), nn.Parameter(torch.linspace(-1, 1, HEADS))

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(row)
        q, k, step = q[:, :1], k[:, :1], F.softplus(self.step(row))
        decay = torch.exp(-step * self.rate.exp())
        state = state * decay[..., None, None] + (step[..., None] * k)[..., None] * v[:, :, None]
        return torch.einsum("bhkv,bok->bhv", state, q).flatten(1), state


class Channels(Mixer):
    """Mamba's: a state for each channel, with a decay for each of its elements."""

    state = (HEADS * VALUES, KEYS)

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.step, self.rates = nn.Linear(WIDTH, HEADS * VALUES), nn.Parameter(torch.rand(HEADS * VALUES, KEYS))

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, x, step = self.q(row)[:, :KEYS], self.k(row)[:, :KEYS], self.v(row), F.softplus(self.step(row))
        state = torch.exp(step[..., None] * -self.rates) * state + (step * x)[..., None] * k[:, None]
        return (state @ q[..., None]).squeeze(-1), state


class Elementwise(Mixer):
    """RG-LRU: h = a h + sqrt(1 - a^2) b, and the output is h."""

    state = (HEADS * VALUES,)

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.step, self.rate = nn.Linear(WIDTH, HEADS * VALUES), nn.Parameter(torch.linspace(-2, 2, HEADS * VALUES))

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        log_a = -F.softplus(self.rate) * torch.sigmoid(self.step(row))
        state = log_a.exp() * state + torch.sqrt(1 - torch.exp(2 * log_a)) * self.v(row)
        return state, state


class Bonus(Mixer):
    """RWKV-6's: reads the state before the token is added, and the token itself times a bonus."""

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.decays, self.bonus = nn.Linear(WIDTH, HEADS * KEYS), nn.Parameter(torch.rand(HEADS, KEYS))

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(row)
        added, decay = k[..., None] * v[..., None, :], torch.exp(-torch.exp(self.decays(row).view(-1, HEADS, KEYS)))
        output = (q[..., None] * (self.bonus[..., None] * added + state)).sum(-2)
        return output.flatten(1), decay[..., None] * state + added


class Corrected(Retention):
    """A delta rule: what is added depends on what the state returns."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(row)
        k = F.normalize(k, dim=-1)
        state = state * self.decay[:, None, None]
        state = state + k[..., None] * (v - (k[..., None] * state).sum(-2))[..., None, :]
        return (q.unsqueeze(-1) * state).sum(-2).flatten(1), state


class Shifted(Mixer):
    """RWKV's token shift: mixes each row with the one before."""

    state = (WIDTH,)

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.share = nn.Parameter(torch.rand(WIDTH))

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.v(row * self.share + state * (1 - self.share)), row


class Convolved(Mixer):
    """A causal convolution of four taps; subclasses write it in other ways."""

    state = (WIDTH, 3)

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([state, row[..., None]], -1)
        return self.v(F.silu((seen * self.conv.weight[:, 0]).sum(-1) + self.conv.bias)), seen[..., 1:]


class ConvolvedByTorch(Convolved):
    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([state, row.unsqueeze(-1)], -1)
        return self.v(self.conv(seen).squeeze(-1)), seen[:, :, -3:]


class Rolled(Convolved):
    """Keeps all rows that it reads, and writes in place."""

    state = (WIDTH, 4)

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.roll(state, shifts=-1, dims=-1)
        state[:, :, -1] = row
        return self.v(torch.einsum("bcw,cw->bc", state, self.conv.weight[:, 0]) + self.conv.bias), state


class TapsFirst(Convolved):
    state = (3, WIDTH)

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([state, row[:, None]], 1)
        return self.v((seen * self.conv.weight[:, 0].t()).sum(1)), seen[:, 1:]


class Model(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, mixer: type[Mixer], layers: int = 1) -> None:
        super().__init__(PretrainedConfig(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=layers, max_position_embeddings=512))
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.mixers = nn.ModuleList(mixer(index) for index in range(layers))
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False, **_: Any) -> CausalLMOutputWithPast:
        cache = States() if use_cache and past_key_values is None else past_key_values
        x = self.embed(input_ids)
        for mixer in self.mixers:
            x = x + mixer(x, cache)
        return CausalLMOutputWithPast(logits=self.head(x), past_key_values=cache)


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """New tokens of one prompt, each from a call on all tokens before it."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def served_like_itself(model: nn.Module) -> list[Completion]:
    """Asserts that an engine gives the model's own tokens for several prompts, and once more: those answers."""
    prompts = [[(7 * i + n) % VOCAB for i in range(n)] for n in (1, 2, 9, 80)]
    expected = [greedy(model, prompt, 5) for prompt in prompts]
    with LLM(model, max_batch_tokens=32, page_size=4, num_pages=64) as llm:
        assert llm.engine.runner.recurrent[0].program is not None
        for _ in range(2):
            answers = llm.generate(prompts, SamplingParams(max_tokens=5, temperature=0))
            assert [list(each.token_ids) for each in answers] == expected
    return answers
