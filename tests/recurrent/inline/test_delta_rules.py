"""Delta rules written inline: a state adds a share of the difference between a value and what it returns for the key."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn.recurrent.as_ops.by_ops import with_ops
from tests.recurrent.inline.remote import HEADS, KEYS, VALUES, WIDTH, Corrected, Mixer, Model, served_like_itself
from tests.recurrent.test_by_ops import layers_of


class Delta(Mixer):
    """DeltaNet's: no decay."""

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.share, self.rate, self.rates = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, HEADS * KEYS)

    def given(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = self.heads(row)
        return q, F.normalize(k, dim=-1), v, self.share(row).sigmoid()

    def decay(self, row: Tensor) -> Tensor:
        return torch.exp(-F.softplus(self.rate(row)))

    def decays(self, row: Tensor) -> Tensor:
        return torch.exp(-F.softplus(self.rates(row)).unflatten(-1, (HEADS, KEYS)))

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, share = self.given(row)
        new = v.clone()
        new = new - (state.clone() * k[..., None]).sum(-2)
        new = new * share[..., None]
        state = state.clone() + k.unsqueeze(-1) * new.unsqueeze(-2)
        return torch.einsum("bhd,bhdm->bhm", q, state).flatten(1), state


class GatedDelta(Delta):
    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, share = self.given(row)
        state = state * self.decay(row)[..., None, None]
        kept = (state * k.unsqueeze(-1)).sum(dim=-2)
        state = state + k.unsqueeze(-1) * ((v - kept) * share.unsqueeze(-1)).unsqueeze(-2)
        return (state * q.unsqueeze(-1)).sum(dim=-2).flatten(1), state


class KimiDelta(Delta):
    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, share = self.given(row)
        state = state * self.decays(row)[..., None]
        state = state + torch.einsum("bhk,bhv->bhkv", share[..., None] * k, v - (k[..., None] * state).sum(-2))
        return torch.einsum("bhk,bhkv->bhv", q, state).flatten(1), state


class Beforehand(Delta):
    """Multiplies keys and values by the share before they meet the state, and subtracts instead of adding."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, share = self.given(row)
        kept = torch.matmul((k * share[..., None]).unsqueeze(-2), state).squeeze(-2)
        state = state - (kept - v * share[..., None]).unsqueeze(-2) * k.unsqueeze(-1)
        return (q[:, :, None] @ state)[:, :, 0].flatten(1), state


class Negated(Delta):
    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, share = self.given(row)
        state = state * self.decay(row)[..., None, None]
        kept = -(state * k.unsqueeze(-1)).sum(-2)
        state = state + k.unsqueeze(-1) @ ((kept + v) / (1 + share[..., None])).unsqueeze(-2)
        return (state * q.unsqueeze(-1)).sum(dim=-2).flatten(1), state


class TransposedDelta(Delta):
    """Keeps values by keys."""

    state = (HEADS, VALUES, KEYS)

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, share = self.given(row)
        state = state * self.decays(row)[:, :, None]
        error = v.unsqueeze(-1) - state @ k.unsqueeze(-1)
        state = state + share[..., None, None] * error @ k.unsqueeze(-2)
        return (state @ q.unsqueeze(-1)).flatten(1), state


class InPlaceDelta(Delta):
    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, share = self.given(row)
        state = state.flatten(0, 1)
        q, k, v, share = (each.flatten(0, 1) for each in (q, k, v, share))
        state.mul_(self.decay(row).view(-1, 1, 1))
        kept = torch.bmm(k[:, None], state)
        state.baddbmm_(k[:, :, None], share[:, None, None] * (v[:, None] - kept))
        return torch.bmm(q[:, None], state).view(len(row), -1), state.view(-1, HEADS, KEYS, VALUES)


class SharedKeys(Delta):
    """One key for all heads, and a share of each channel of the values."""

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.shares = nn.Linear(WIDTH, HEADS * VALUES)

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, _ = self.given(row)
        k, share = k[:, :1], self.shares(row).sigmoid().view_as(v)
        kept = (state * k.unsqueeze(-1)).sum(-2)
        state = state + k.unsqueeze(-1) * ((v - kept) * share).unsqueeze(-2)
        return (state * q.unsqueeze(-1)).sum(dim=-2).flatten(1), state


RULES: dict[type[Mixer], str] = {
    Corrected: "gated_delta_rule", Delta: "gated_delta_rule", GatedDelta: "gated_delta_rule", KimiDelta: "kda",
    Beforehand: "gated_delta_rule", Negated: "gated_delta_rule", TransposedDelta: "kda", InPlaceDelta: "gated_delta_rule",
    SharedKeys: "gated_delta_rule",
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixer", RULES, ids=lambda mixer: mixer.__name__)
def test_it_is_proved(mixer: type[Mixer], dtype: torch.dtype) -> None:
    (layer,) = with_ops(layers_of(Model(mixer).to(dtype)))
    shape = (HEADS * VALUES, KEYS, 1) if mixer is SharedKeys else (HEADS, KEYS, VALUES)
    assert (layer.ops, layer.spec.states[0].shape) == ((RULES[mixer],), shape), layer.why_no_ops


@pytest.mark.parametrize("mixer", RULES, ids=lambda mixer: mixer.__name__)
def test_tokens_are_the_models_own(mixer: type[Mixer]) -> None:
    served_like_itself(Model(mixer))


class Elsewhere(Delta):
    """What it returns for one key is added at another."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, _ = self.given(row)
        state = state + k.unsqueeze(-1) * (v - (state * F.normalize(q, dim=-1).unsqueeze(-1)).sum(-2)).unsqueeze(-2)
        return (state * q.unsqueeze(-1)).sum(dim=-2).flatten(1), state


class Twice(Delta):
    """Two corrections, one after the other."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, _ = self.given(row)
        for key in (k, F.normalize(q, dim=-1)):
            state = state + key.unsqueeze(-1) * (v - (state * key.unsqueeze(-1)).sum(-2)).unsqueeze(-2)
        return (state * q.unsqueeze(-1)).sum(dim=-2).flatten(1), state


class Late(Delta):
    """Asks the state before it decays."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, _ = self.given(row)
        kept = (state * k.unsqueeze(-1)).sum(-2)
        state = state * self.decay(row)[..., None, None] + k.unsqueeze(-1) * (v - kept).unsqueeze(-2)
        return (state * q.unsqueeze(-1)).sum(dim=-2).flatten(1), state


class Forgetful(Delta):
    """Forgets all that it returns, and learns a share."""

    def token(self, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, share = self.given(row)
        kept = (state * k.unsqueeze(-1)).sum(-2)
        state = state + k.unsqueeze(-1) * (v * share[..., None] - kept * 0.5 * share[..., :1, None]).unsqueeze(-2)
        return (state * q.unsqueeze(-1)).sum(dim=-2).flatten(1), state


@pytest.mark.parametrize(
    ("mixer", "why"),
    [
        (Elsewhere, "what its state returns for one key is added to it at another"),
        (Twice, "its new state is not the state before times something, plus one product"),
        (Late, "what is added to its state depends on what it returned before it decayed"),
        (Forgetful, "of what its state returns it forgets another share than it learns"),
    ],
)
def test_what_is_no_delta_rule_runs_its_own_forward(mixer: type[Mixer], why: str) -> None:
    (layer,) = with_ops(layers_of(Model(mixer)))
    assert not layer.ops and layer.why_no_ops == f"it calls no function that an op is known for, and {why}"
