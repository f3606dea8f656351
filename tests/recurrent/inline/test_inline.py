"""Recurrences written inline are read from the graph of one token's step, whatever they are called and however they keep their state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged_attn import LLM, SamplingParams
from paged_attn.recurrent.as_ops.by_ops import with_ops
from paged_attn.recurrent.as_ops.state_dtype import with_state_dtype
from tests.recurrent.inline import remote
from tests.recurrent.inline.remote import HEADS, KEYS, VALUES, WIDTH, Mixer, Model, Retention, greedy
from tests.recurrent.test_by_ops import layers_of

MATRIX = ("linear_attention", (HEADS, KEYS, VALUES))
FOUND = {
    remote.Retention: MATRIX, remote.Transposed: MATRIX, remote.Flat: MATRIX, remote.Gated: MATRIX, remote.Selective: MATRIX,
    remote.Bonus: MATRIX,
    remote.Channels: ("mamba1_scan", (HEADS * VALUES, KEYS)), remote.Elementwise: ("mamba1_scan", (HEADS * VALUES, 1)),
    remote.Shifted: ("short_conv", (WIDTH, 1)), remote.Convolved: ("short_conv", (WIDTH, 3)),
    remote.ConvolvedByTorch: ("short_conv", (WIDTH, 3)), remote.Rolled: ("short_conv", (WIDTH, 4)),
    remote.TapsFirst: ("short_conv", (WIDTH, 3)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixer", FOUND, ids=lambda mixer: mixer.__name__)
def test_it_is_proved(mixer: type[Mixer], dtype: torch.dtype) -> None:
    (layer,) = with_ops(layers_of(Model(mixer).to(dtype)))
    assert (layer.ops, layer.spec.states[0].shape) == ((FOUND[mixer][0],), FOUND[mixer][1]), layer.why_no_ops
    assert layer.takes_chunks and layer.in_graphs


@pytest.mark.parametrize("mixer", FOUND, ids=lambda mixer: mixer.__name__)
def test_tokens_are_the_models_own(mixer: type[Mixer]) -> None:
    assert any(each.cached_tokens for each in remote.served_like_itself(Model(mixer)))


def test_its_state_may_have_fewer_bits() -> None:
    class Wide(Retention):
        def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            output, state = super().token(row, state.float())
            return output.to(row.dtype), state

    layers = with_ops(layers_of(Model(Wide).to(torch.bfloat16)))
    assert layers[0].ops == ("linear_attention",) and layers[0].spec.states[0].dtype == torch.float32
    (layer,) = with_state_dtype(layers, "bfloat16")
    assert layer.spec.states[0].dtype == torch.bfloat16


class Recalled(Retention):
    """Reads its state with two queries."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, state = super().token(row, state)
        _, k, _ = self.heads(row)
        return output + (k.unsqueeze(-1) * state).sum(-2).flatten(1), state


class Added(Retention):
    """Learns two products at once."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, _, v = self.heads(row)
        return super().token(row, state + q.unsqueeze(-1) * v.unsqueeze(-2))


@pytest.mark.parametrize("mixer", [Recalled, Added], ids=lambda mixer: mixer.__name__)
def test_a_small_state_may_be_read_and_written_in_any_way(mixer: type[Mixer]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        (layer,) = with_ops(layers_of(Model(mixer).to(dtype)))
        assert (layer.ops, layer.spec.states[0].shape) == (("channel_scan",), (HEADS * KEYS * VALUES,)), layer.why_no_ops
    expected = greedy(model := Model(mixer), [1, 2, 3, 4], 6)
    with LLM(model) as llm:
        (answer,) = llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=6, temperature=0))
    assert list(answer.token_ids) == expected


class Whole(Retention):
    """Returns what its state holds, which is more than a token's row can be."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        _, state = super().token(row, state)
        return state.tanh().sum(-2).flatten(1), state


class Scaled(Retention):
    """Reads a tensor that no module holds."""

    outside = torch.full((HEADS, 1, 1), 0.5)

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return super().token(row, state * self.outside)


@pytest.mark.parametrize(
    ("mixer", "why"),
    [
        (Recalled, "its state is read with several queries"),
        (Added, "its new state is not the state before times something, plus one product"),
        (Scaled, "it reads a tensor [3, 1, 1] that is neither its module's nor computed from its inputs"),
    ],
)
def test_what_is_no_known_recurrence_runs_its_own_forward(monkeypatch: pytest.MonkeyPatch, mixer: type[Mixer], why: str) -> None:
    monkeypatch.setattr("paged_attn.recurrent.inline.find.channels.WIDEST", 2)
    (layer,) = with_ops(layers_of(Model(mixer)))
    assert not layer.ops and layer.program is None
    assert layer.why_no_ops == f"it calls no function that an op is known for, and {why}"


def test_a_wide_state_that_is_read_as_it_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("insert", "find.channels"):
        monkeypatch.setattr(f"paged_attn.recurrent.inline.{file}.WIDEST", 2)
    (layer,) = with_ops(layers_of(Model(Whole)))
    assert layer.why_no_ops.endswith(f"for each token it would need 72 scores, decays or elements of its state; allowed are {2 * WIDTH}")


def test_numbers_of_a_layer_are_its_own() -> None:
    """Layers of one kind are proved once, and each is read by itself: what it computes may depend on its number."""

    class Numbered(Retention):
        def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            output, state = super().token(row, state)
            return output * (1 + self.layer_idx), state

    model = Model(Numbered, layers=2)
    first, second = with_ops(layers_of(model))
    assert first.program is not None and second.program is not None and first.program.text != second.program.text
    expected = greedy(model, [1, 2, 3, 4], 6)
    with LLM(model) as llm:
        (answer,) = llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=6, temperature=0))
    assert list(answer.token_ids) == expected


class InPlace(Retention):
    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(row)
        state.mul_(self.decay[:, None, None]).add_(k.unsqueeze(-1) * v.unsqueeze(-2))
        return (q.unsqueeze(-1) * state).sum(-2).flatten(1), state


class Divided(Retention):
    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(row)
        state = state / (1 + k.abs().sum(-1)[..., None, None]) - k.unsqueeze(-1) * v.unsqueeze(-2)
        return (q.unsqueeze(-1) * state / 2).sum(-2).flatten(1), state


class Lerped(remote.Elementwise):
    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.lerp(state, self.v(row), torch.sigmoid(self.step(row)))
        return state * 2, state


class Addcmul(Retention):
    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(row)
        state = torch.addcmul(state * 0.5, k.unsqueeze(-1), v.unsqueeze(-2))
        return torch.matmul(q.unsqueeze(-2), state).flatten(1), state


class Grouped(Retention):
    """Two dimensions of heads, of which one shares keys."""

    state = (1, HEADS, KEYS, VALUES)

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (each[:, None] for each in self.heads(row))
        state = state * self.decay[:, None, None] + k[:, :, :1, :, None] * v[..., None, :]
        return torch.einsum("bghkv,bghk->bghv", state, q).flatten(1), state


class Joined(Retention):
    """Takes a token out of what is joined along another dim."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        widths = HEADS * KEYS, HEADS * KEYS, HEADS * VALUES
        joined = torch.cat([linear(row[:, None]) for linear in (self.q, self.k, self.v)], -1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in joined[:, 0].split(widths, -1))
        state = state * self.decay[:, None, None] + k.unsqueeze(-1) * v.unsqueeze(-2)
        return (q.unsqueeze(-1) * state).sum(-2).flatten(1), state


class Skipping(remote.Channels):
    """Some steps are zero, and what is added is not multiplied with them."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, x, step = self.q(row)[:, :KEYS], self.k(row)[:, :KEYS], self.v(row), torch.relu(self.step(row))
        state = torch.exp(step[..., None] * -self.rates) * state + x[..., None] * k[:, None]
        return (state @ q[..., None]).squeeze(-1), state


@pytest.mark.parametrize("mixer", [InPlace, Divided, Lerped, Addcmul, Grouped, Joined, Skipping], ids=lambda mixer: mixer.__name__)
def test_other_words_for_the_same(mixer: type[Mixer]) -> None:
    (layer,) = with_ops(layers_of(Model(mixer)))
    assert layer.ops, layer.why_no_ops


def test_what_a_module_keeps_of_a_call_is_no_tensor_without_numbers() -> None:
    class Keeping(Retention):
        kept: Tensor | None = None

        def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            self.kept = row if self.kept is None else self.kept
            return super().token(row, state)

    layers = layers_of(Model(Keeping))
    layers[0].module.kept = None
    (layer,) = with_ops(layers)
    assert layer.ops and type(layer.module.kept) is Tensor


def test_a_layer_in_training_is_read_as_it_evaluates() -> None:
    class Dropping(Retention):
        def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return super().token(torch.nn.functional.dropout(row, 0.5, self.training), state)

    layers = layers_of(Model(Dropping, layers=2))
    for layer in layers:
        layer.module.train()
    assert all(layer.program is not None and "dropout" not in layer.program.text for layer in with_ops(layers))
