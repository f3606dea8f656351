"""Running maxima and the sums that they keep in range: RWKV-4, xLSTM, and remote code with several states."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_attn import SamplingParams
from paged_attn.recurrent.as_ops.by_ops import with_ops
from paged_attn.recurrent.inline.starts import LOWEST, starts_of
from paged_attn.recurrent.program import NoOpFits
from tests.engine.models import assert_idle, make_llm
from tests.engine.test_recurrent import poison_freed_slots
from tests.oracle import greedy, random_prompts
from tests.recurrent.inline import remote
from tests.recurrent.inline.remote import HEADS, KEYS, VALUES, WIDTH, Mixer, Model, States
from tests.recurrent.test_by_ops import layers_of
from tests.zoo.build import build

PROMPTS = random_prompts((1, 5, 64, 200))
NEW = 8
OPS = {
    "rwkv": ("short_conv", "channel_scan", "channel_scan", "channel_scan"),
    "xlstm": ("linear_attention", "linear_attention", "channel_scan"),
}


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    return build(name)


@functools.cache
def expected(name: str) -> list[list[int]]:
    return [greedy(model_of(name), prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("settings", [{"page_size": 16}, {"page_size": 1, "state_snapshots": 16, "max_requests": 2}], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_tokens_are_the_models_in_ragged_chunked_batches_and_from_snapshots(name: str, settings: dict[str, int]) -> None:
    llm = make_llm(model_of(name), **{"num_pages": 600, "max_batch_tokens": 48, **settings})
    poison_freed_slots(llm.engine)
    assert {layer.ops for layer in llm.engine.runner.recurrent} <= {OPS[name], ("short_conv",)}
    assert OPS[name] in {layer.ops for layer in llm.engine.runner.recurrent}
    for run in ("cold", "warm"):
        got = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
        assert [each.token_ids for each in got] == expected(name), run
        assert any(each.cached_tokens for each in got) == (run == "warm")
    assert_idle(llm.engine)


class Several(Mixer):
    """Keeps a tuple of states, of which the first token finds `start`."""

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def tokens(self, row: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        raise NotImplementedError

    def forward(self, x: Tensor, cache: States | None) -> Tensor:
        states = cache.states.get(self.layer_idx) if cache is not None else None
        if states is None:
            states = self.start(x)
        outputs = []
        for row in x.unbind(1):
            output, states = self.tokens(row, states)
            outputs.append(output)
        if cache is not None:
            cache.states[self.layer_idx] = states
        return self.out(torch.stack(outputs, 1) * F.silu(self.gate(x)))


class Stabilised(Several):
    """Linear attention with exponential gates: a matrix, the sum of keys, and the largest exponent so far."""

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.gates = nn.Linear(WIDTH, 2 * HEADS)

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        batch = len(x)
        return x.new_zeros(batch, HEADS, KEYS, VALUES), x.new_zeros(batch, HEADS, KEYS), x.new_full((batch, HEADS), -50.0)

    def tokens(self, row: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        (memory, keys, largest), (q, k, v) = states, self.heads(row)
        learn, forget = self.gates(row).mul(4).chunk(2, -1)
        forget = F.logsigmoid(forget)
        now = torch.max(learn, largest + forget)
        kept, added = torch.exp(largest + forget - now), torch.exp(learn - now)
        memory = kept[..., None, None] * memory + added[..., None, None] * (k[..., None] * v[..., None, :])
        keys = kept[..., None] * keys + added[..., None] * k
        found = torch.einsum("bhk,bhkv->bhv", q, memory)
        scale = torch.maximum((q * keys).sum(-1).abs(), torch.exp(-now)) + 1e-6
        return (found / scale[..., None]).flatten(1), (memory, keys, now)


class Weighted(Several):
    """RWKV-4's: sums of values and weights, relative to the largest exponent, with a bonus of the token itself; the largest comes first."""

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        count = HEADS * VALUES
        self.keys, self.rate, self.bonus = nn.Linear(WIDTH, count), nn.Parameter(torch.rand(count)), nn.Parameter(torch.randn(count))

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        empty = x.new_zeros(len(x), HEADS * VALUES)
        return empty - 1e30, empty, empty

    def tokens(self, row: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        (largest, above, below), k, v = states, self.keys(row) * 4, self.v(row)
        at = torch.maximum(largest, k + self.bonus)
        old, new = torch.exp(largest - at), torch.exp(k + self.bonus - at)
        output = (old * above + new * v) / (old * below + new)
        now = torch.maximum(largest - self.rate, k)
        old, new = torch.exp(largest - self.rate - now), torch.exp(k - now)
        return output, (now, old * above + new * v, old * below + new)


SEVERAL = {Stabilised: ("linear_attention", "linear_attention", "channel_scan"), Weighted: ("channel_scan",) * 3}


@pytest.mark.parametrize("mixer", SEVERAL, ids=lambda mixer: mixer.__name__)
def test_it_is_proved_and_tokens_are_the_models_own(mixer: type[Mixer]) -> None:
    model = Model(mixer)
    for dtype in (torch.bfloat16, torch.float32):
        (layer,) = with_ops(layers_of(model.to(dtype)))
        assert layer.ops == SEVERAL[mixer], layer.why_no_ops
    remote.served_like_itself(model)


class Coupled(Several):
    """Two states, each of which decides what becomes of the other."""

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.new_zeros(len(x), HEADS * VALUES),) * 2

    def tokens(self, row: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        one, other = states
        return one + other, (one * 0.5 + other.tanh() + self.v(row), other * 0.5 + one.tanh())


class Started(Several):
    """A matrix that starts from ones, as no op's does."""

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.new_ones(len(x), HEADS, KEYS, VALUES),)

    def tokens(self, row: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v = self.heads(row)
        state = states[0] * 0.5 + k.unsqueeze(-1) * v.unsqueeze(-2)
        return (q.unsqueeze(-1) * state).sum(-2).flatten(1), (state,)


class Differing(Started):
    """Starts from other numbers in each head."""

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return (torch.arange(HEADS * KEYS * VALUES, dtype=x.dtype).view(1, HEADS, KEYS, VALUES).expand(len(x), -1, -1, -1),)


@pytest.mark.parametrize(
    ("mixer", "why"),
    [
        (Coupled, "it calls no function that an op is known for, and each of its states is made of what another one returns"),
        (Started, "its ops are off by "), (Differing, "its ops are off by "),
    ],
)  # fmt: skip
def test_what_no_scan_computes_runs_its_own_forward(mixer: type[Mixer], why: str) -> None:
    (layer,) = with_ops(layers_of(Model(mixer)))
    assert not layer.ops and layer.why_no_ops.startswith(why)


def test_where_states_start() -> None:
    layer = next(layer for layer in layers_of(model_of("rwkv")) if len(layer.spec.states) == 4)
    assert starts_of(layer, [3]) == [0.0, 0.0, 0.0, pytest.approx(-1e30)]
    (unknown,) = layers_of(Model(Weighted))
    assert starts_of(unknown, [0]) == [LOWEST, 0.0, 0.0] and starts_of(unknown, []) == [0.0] * 3
    differing = copy.copy(layer.template)
    differing._start = {path: torch.arange(value.numel()).view_as(value) for path, value in layer.template._start.items()}
    with pytest.raises(NoOpFits, match="its state starts from several numbers"):
        starts_of(dataclasses.replace(layer, template=differing), [])


def test_a_matrix_that_starts_from_ones_is_refused_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_attn.recurrent.inline.make_program.starts_of", lambda layer, _: [1.0] * len(layer.spec.states))
    (layer,) = with_ops(layers_of(Model(Started)))
    assert layer.why_no_ops.endswith("its state starts from 1, and only one of single numbers may start from another number than 0")
