"""Layers that step each head by itself, in a loop: what the heads keep are states of their own."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_attn import SamplingParams
from paged_attn.recurrent.as_ops.by_ops import with_ops
from tests.engine.models import assert_idle, make_llm
from tests.engine.test_recurrent import poison_freed_slots
from tests.oracle import greedy, random_prompts
from tests.recurrent.inline import remote
from tests.recurrent.inline.remote import HEADS, KEYS, VALUES, WIDTH, Mixer, Model, Retention
from tests.recurrent.test_by_ops import layers_of
from tests.zoo.build import build

PROMPTS = random_prompts((1, 5, 64, 300))
NEW = 8


@functools.cache
def zamba() -> PreTrainedModel:
    return build("zamba", max_position_embeddings=512)


@pytest.mark.parametrize("settings", [{"page_size": 16}, {"page_size": 1, "state_snapshots": 16, "max_requests": 2}], ids=str)
def test_zambas_tokens_are_the_models_in_ragged_chunked_batches_and_from_snapshots(settings: dict[str, int]) -> None:
    expected = [greedy(zamba(), prompt, NEW) for prompt in PROMPTS]
    assert len(set(map(tuple, expected))) == len(expected)
    llm = make_llm(zamba(), **{"num_pages": 600, "max_batch_tokens": 48, **settings})
    poison_freed_slots(llm.engine)
    assert all(layer.ops == ("short_conv", "mamba1_scan", "mamba1_scan") for layer in llm.engine.runner.recurrent)
    assert [state.name for state in llm.engine.runner.recurrent[0].spec.states][1:] == ["recurrent_states[0][0]", "recurrent_states[0][1]"]
    for run in ("cold", "warm"):
        got = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
        assert [each.token_ids for each in got] == expected, run
        assert any(each.cached_tokens for each in got) == (run == "warm")
    assert_idle(llm.engine)


def test_zamba_is_proved_in_16_bits() -> None:
    for layer in with_ops(layers_of(build("zamba").to(torch.bfloat16))):
        assert layer.ops == ("short_conv", "mamba1_scan", "mamba1_scan"), layer.why_no_ops


class Stacked(Retention):
    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, states = [], []
        for before, decay, q, k, v in zip(state.unbind(1), self.decay, *(each.unbind(1) for each in self.heads(row)), strict=True):
            states.append(before * decay + k[:, :, None] * v[:, None])
            outputs.append(torch.einsum("bk,bkv->bv", q, states[-1]))
        return torch.cat(outputs, -1), torch.stack(states, 1)


class Written(Stacked):
    """Writes each head's state in its place, and reads it there again."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, (q, k, v) = [], self.heads(row)
        for head in range(HEADS):
            state[:, head] = state[:, head] * self.decay[head] + k[:, head, :, None] * v[:, head, None]
            outputs.append((q[:, head, None] @ state[:, head]).squeeze(1))
        return torch.cat(outputs, -1), state


class Corrected(Stacked):
    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, states = [], []
        for before, q, k, v in zip(state.unbind(1), *(each.unbind(1) for each in self.heads(row)), strict=True):
            k = nn.functional.normalize(k, dim=-1)
            states.append(before + torch.einsum("bk,bv->bkv", k, v - (k[:, None] @ before)[:, 0]))
            outputs.append((q[:, None] @ states[-1])[:, 0])
        return torch.cat(outputs, -1), torch.stack(states, 1)


class ChannelsLooped(remote.Channels):
    """Heads of channels, of which each has a scan of its own."""

    state = (2, HEADS * VALUES // 2, KEYS)

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (linear(row)[:, : 2 * KEYS].chunk(2, -1) for linear in (self.q, self.k))
        x, step = (each.chunk(2, -1) for each in (self.v(row), nn.functional.softplus(self.step(row))))
        outputs, rates = [], self.rates.chunk(2)
        for head in range(2):
            state[:, head] = (
                torch.exp(step[head][..., None] * -rates[head]) * state[:, head] + (step[head] * x[head])[..., None] * k[head][:, None]
            )
            outputs.append((state[:, head] @ q[head][..., None]).squeeze(-1))
        return torch.cat(outputs, -1), state


LOOPS: dict[type[Mixer], tuple[str, tuple[int, ...]]] = {
    Stacked: ("linear_attention", (1, KEYS, VALUES)), Written: ("linear_attention", (1, KEYS, VALUES)),
    Corrected: ("gated_delta_rule", (1, KEYS, VALUES)), ChannelsLooped: ("mamba1_scan", (HEADS * VALUES // 2, KEYS)),
}  # fmt: skip


@pytest.mark.parametrize("mixer", LOOPS, ids=lambda mixer: mixer.__name__)
def test_each_head_is_a_state(mixer: type[Mixer]) -> None:
    op, shape = LOOPS[mixer]
    heads = mixer.state[0]
    for dtype in (torch.float32, torch.bfloat16):
        (layer,) = with_ops(layers_of(Model(mixer).to(dtype)))
        assert layer.ops == (op,) * heads, layer.why_no_ops
        assert [state.shape for state in layer.spec.states] == [shape] * heads


@pytest.mark.parametrize("mixer", LOOPS, ids=lambda mixer: mixer.__name__)
def test_tokens_are_the_models_own(mixer: type[Mixer]) -> None:
    remote.served_like_itself(Model(mixer))


class Mixed(Stacked):
    """Takes its state apart, and also reads it as a whole."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, after = super().token(row, state)
        return output + state.sum((1, 2, 3))[:, None], after


def test_a_state_that_is_also_read_as_a_whole_is_one_state() -> None:
    (layer,) = with_ops(layers_of(Model(Mixed)))
    assert not layer.ops and layer.why_no_ops.endswith("its new state is no linear function of the state before")


class Wider(remote.Convolved):
    """Keeps more rows than it reads, and takes the last column of the convolution, as transformers' `causal_conv1d_update` does."""

    state = (WIDTH, 4)

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([state, row.unsqueeze(-1)], -1)
        return self.v(nn.functional.silu(self.conv(seen)[:, :, -1:]).squeeze(-1)), seen[:, :, -4:]


class AllColumns(Wider):
    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([state, row.unsqueeze(-1)], -1)
        return self.v(nn.functional.silu(self.conv(seen)).sum(-1)), seen[:, :, -4:]


def test_a_convolution_of_which_the_last_column_is_used() -> None:
    (layer,) = with_ops(layers_of(Model(Wider)))
    assert (layer.ops, layer.spec.states[0].shape) == (("short_conv",), (WIDTH, 4)), layer.why_no_ops
    (layer,) = with_ops(layers_of(Model(AllColumns)))
    assert not layer.ops
