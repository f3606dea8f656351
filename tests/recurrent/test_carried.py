"""State that a module is given and gives back is kept for each request; nothing but its form shows it."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import paged_attn
from paged_attn import UnsupportedError
from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, StateCheckpoint
from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.recurrent.as_ops.by_ops import with_ops
from paged_attn.recurrent.discover import find_recurrent_layers, recurrent_modules, refuse_recurrent
from paged_attn.recurrent.run import RecurrentRunner
from tests.engine.models import assert_idle, make_llm
from tests.engine.test_recurrent import GREEDY, PROMPTS, poison_freed_slots
from tests.oracle import greedy
from tests.recurrent_models import without_cache
from tests.tiny_models import COMMON

MODELS: dict[str, dict[str, Any]] = {
    # In evaluation it divides weights of each layer but the first, once, and hidden states after each layer.
    "rwkv": {"attention_hidden_size": 32, "context_length": 256, "rescale_every": 1},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 4, "chunk_size": 8},
}


def fresh(name: str) -> PreTrainedModel:
    config = AutoConfig.for_model(name, **{**{key: value for key, value in COMMON.items() if key != "head_dim"}, **MODELS[name]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model.eval()


@functools.cache
def served(name: str) -> PreTrainedModel:
    return fresh(name)


@functools.cache
def expected(name: str) -> list[list[int]]:
    model = fresh(name)
    found = [greedy(model, prompt, GREEDY.max_new_tokens) for prompt in PROMPTS]
    assert found == [without_cache(model, prompt, GREEDY.max_new_tokens) for prompt in PROMPTS]
    assert all(len(set(tokens)) > 3 for tokens in found), "an oracle that repeats itself shows nothing"
    return found


@pytest.mark.parametrize(
    "settings", [{"page_size": 1}, {"page_size": 16, "max_requests": 2, "state_snapshots": 16}, {"page_size": 4, "num_pages": 23}], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_models_own(name: str, settings: dict[str, Any]) -> None:
    """Ragged prompts in chunks beside decoding, with fewer slots than requests, preempted, and from snapshots; freed slots are NaN."""
    llm = make_llm(served(name), **{"num_pages": 400, "max_batch_tokens": 16, **settings})
    poison_freed_slots(llm.engine)
    for run in ("cold", "warm"):
        got = llm.generate(PROMPTS, GREEDY)
        assert [each.token_ids for each in got] == expected(name), run
        if run == "warm" and "num_pages" not in settings:
            pages = settings["page_size"]
            assert [each.cached_tokens for each in got] == [(len(prompt) - 1) // pages * pages for prompt in PROMPTS]
    assert llm.engine.scheduler.stats.preemptions > 0 or "num_pages" not in settings
    assert_idle(llm.engine)
    assert [greedy(served(name), PROMPTS[2], 12)] == expected(name)[2:3], "the model itself is what it was"


def test_a_model_that_prepares_its_weights_does_so_once() -> None:
    model, other = fresh("rwkv"), fresh("rwkv")
    with torch.no_grad():
        other(input_ids=torch.tensor([PROMPTS[1]]))
    find_recurrent_layers(model, lambda length: {"input_ids": torch.arange(length)[None]})
    assert model.rwkv.layers_are_rescaled
    assert all(value.equal(other.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_column_of_a_stack_of_states_is_a_state_of_its_own_in_an_op() -> None:
    """RWKV's token shift is a convolution of two taps; its attention keeps a running maximum, and two sums relative to that."""
    layers = with_ops(find_recurrent_layers(served("rwkv"), lambda length: {"input_ids": torch.arange(length)[None]}))
    assert [layer.ops for layer in layers] == [("short_conv", *["channel_scan"] * 3), ("short_conv",)] * 3


def test_explain_and_the_roads_without_state() -> None:
    text = paged_attn.explain(make_llm(served("rwkv"), page_size=1, num_pages=400, max_batch_tokens=16, disable_passes=("scans",)))
    assert (
        "3 recurrent layers  rwkv.blocks.{0-2}.attention" in text
        and "state[1][:, :, i] 32 float32" in text
        and "by its own forward" in text
    )
    with pytest.raises(UnsupportedError, match=r"keeps recurrent state in rwkv\.blocks\.0\.attention \(and 5 more like it\)"):
        refuse_recurrent(served("rwkv"), "torch.compile")


class Cell(nn.Module):
    """h_t = h_{t-1} / 2 + x_t; gives back a new state."""

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        now, outputs = (torch.zeros_like(x[:, 0]) if state is None else self.read(state)), []
        for token in x.unbind(1):
            now = now / 2 + token
            outputs.append(now)
        return torch.stack(outputs, 1), None if state is None else self.write(state, now)

    def read(self, state: Any) -> Tensor:
        return state

    def write(self, state: Any, now: Tensor) -> Any:
        return now

    @staticmethod
    def empty(layers: int, width: int) -> Any:
        return torch.zeros(1, width)


class Named(Cell):
    """Its state lies in a dict, beside what it does not change; it starts at one, not at zero."""

    def read(self, state: Any) -> Tensor:
        return state["h"][..., 0] - 1

    def write(self, state: Any, now: Tensor) -> Any:
        return {**state, "h": now[..., None] + 1}

    @staticmethod
    def empty(layers: int, width: int) -> Any:
        return {"h": torch.ones(1, width, 1), "scale": torch.full((1, 3), 2.0)}


class Stacked(Cell):
    """All layers share one tensor, of which each writes its row in place."""

    index = 0

    def read(self, state: Any) -> Tensor:
        return state[0][:, self.index].clone()

    def write(self, state: Any, now: Tensor) -> Any:
        state[0][:, self.index] = now
        return state

    @staticmethod
    def empty(layers: int, width: int) -> Any:
        return [torch.zeros(1, layers, width)]


class Smeared(Stacked):
    """Writes into the rows of other layers, too."""

    def write(self, state: Any, now: Tensor) -> Any:
        state[0] += now[:, None]
        return state


class Forgets(Cell):
    def read(self, state: Any) -> Tensor:
        return torch.zeros_like(state)


class Wrapped(nn.Module):
    """Passes the state on to what is inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.inner(x.sin(), state)
        return x + y, state


class Toy(nn.Module):
    config = types.SimpleNamespace(use_cache=True)

    def __init__(self, kind: type[Cell], layers: int = 3, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cells, self.kind = nn.Embedding(20, width), nn.ModuleList(), kind
        for index in range(layers):
            cell = kind()
            cell.index = index
            self.cells.append(Wrapped(cell))

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> tuple[Tensor, Any]:
        x, shared = self.embed(input_ids), issubclass(self.kind, Stacked)
        states = [self.kind.empty(len(self.cells), x.shape[-1]) if use_cache else None for _ in self.cells]
        for index, cell in enumerate(self.cells):
            x, states[index] = cell(x, states[0 if shared else index])
        return x, states


def inputs_of(length: int) -> dict[str, Any]:
    return {"input_ids": torch.arange(length)[None] % 7}


@pytest.mark.parametrize(
    ("kind", "name", "shape"), [(Cell, "state", (6,)), (Named, "state['h']", (6, 1)), (Stacked, "state[0][:, i]", (6,))]
)
def test_a_ragged_batch_equals_each_prompt_alone(kind: type[Cell], name: str, shape: tuple[int, ...]) -> None:
    """Chunks, decode rows, a fresh request, states kept on the way, and padding, on slots in any order among NaN."""
    toy = Toy(kind)
    assert recurrent_modules(toy, inputs_of) == [f"cells.{index}.inner" for index in range(3)]
    layers = find_recurrent_layers(toy, inputs_of)
    for layer in layers:
        (state,) = layer.spec.states
        assert (state.name, state.shape, layer.chunks, layer.batches) == (name, shape, True, True)
        prompts, slots, done = [torch.randn(n, 6) for n in (9, 4, 6, 1)], [4, 1, 5, 2], [0] * 4
        runner = RecurrentRunner([layer], StatePool([layer.spec], 7))
        runner.pool.fill(float("nan"))
        got: list[list[Tensor]] = [[] for _ in prompts]
        for counts in ((5, 1, 3, 0), (1, 1, 0, 0), (3, 1, 1, 1), (0, 1, 2, 0)):
            active = [i for i, count in enumerate(counts) if count]
            requests = [BatchRequest([1] * counts[i], [1, 2, 3], done[i], state_slot=slots[i]) for i in active]
            if not any(done):
                requests[0] = requests[0]._replace(checkpoints=[StateCheckpoint(2, 3)])
            rows = torch.cat([prompts[i][done[i] : done[i] + counts[i]] for i in active] + [torch.full((2, 6), float("nan"))])[None]
            output = torch.full_like(rows, 7.0)
            runner.forward(runner.plan(Batch.build(requests, 4)), 0, [rows], output)
            assert not output[0, -2:].any(), "padding"
            for i, part in zip(active, output[0, :-2].split([counts[i] for i in active]), strict=True):
                got[i].append(part)
                done[i] += counts[i]
        for prompt, parts in zip(prompts, got, strict=True):
            torch.testing.assert_close(torch.cat(parts), Cell()(prompt[None])[0][0])
        torch.testing.assert_close(runner.pool.states(0)[0][3], layer.run([prompts[0][None, :2]], None)[1][0][0])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Smeared, r"cells\.0\.inner keeps recurrent state, .* it changes all of state\[0\], which other layers change, too"),
        (Forgets, r"cells\.0\.inner keeps recurrent state, but its own forward gives another result token by token"),
    ],
)
def test_refusals(kind: type[Cell], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        find_recurrent_layers(Toy(kind), inputs_of)
