"""Recurrent layers are found by what they write into a cache, and run in the calls in which they are right."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from paged_attn import UnsupportedError
from paged_attn.attn_ops.batch import packed_ints
from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, StateCheckpoint
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.attn_ops.specs.recurrent import StateSpec
from paged_attn.recurrent import discover
from paged_attn.recurrent.as_ops.wrap import replaced_by_ops
from paged_attn.recurrent.cache_state import changed_paths, name_of, snapshot
from paged_attn.recurrent.discover import find_recurrent_layers, recurrent_modules
from paged_attn.recurrent.long_chunks import with_long_chunks
from paged_attn.recurrent.run import RecurrentRunner
from paged_attn.recurrent.same_kind import kind_of
from paged_attn.recurrent.verify import FORMULAS_APART
from tests.recurrent_models import RECURRENT, recurrent
from tests.tiny_models import build

STEPWISE = ("jamba", "mamba")  # the selective scan of Mamba-1 takes no state to start from


class ToyCache(Cache):
    """Keeps the states of its layers in a list that grows as they are set, as some models' own caches do."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.sums: list[Any] = []
        self.seen = 0


class Mixer(nn.Module):
    """out_t = h_t = h_{t-1} / 2 + x_t; each subclass is wrong, or different, in one way."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, hidden: Tensor, cache: ToyCache | None = None, gate: tuple[Tensor, Tensor] | None = None, flag: bool = False) -> Any:
        state = None if cache is None or len(cache.sums) <= self.index else cache.sums[self.index]
        state = self.start(state, hidden)
        outputs = []
        for token in hidden.unbind(1):
            state = state / 2 + token
            outputs.append(state)
        if cache is not None:
            cache.sums += [None] * (self.index + 1 - len(cache.sums))
            cache.sums[self.index] = state
            self.note(cache, hidden)
        return self.result(torch.stack(outputs, 1), state, gate)

    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        return torch.zeros_like(hidden[:, 0]) if state is None else state

    def note(self, cache: ToyCache, hidden: Tensor) -> None:
        pass

    def result(self, outputs: Tensor, state: Tensor, gate: Any) -> Any:
        return outputs


class Gated(Mixer):
    """Multiplies by the second tensor of a tuple that it is given per token, and returns its state after its output."""

    def result(self, outputs: Tensor, state: Tensor, gate: Any) -> Any:
        return None, outputs * gate[1], state


class ForgetsInChunks(Mixer):
    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        return super().start(state if hidden.shape[1] == 1 else None, hidden)


class ForgetsInLongChunks(Mixer):
    """Steps up to 64 tokens; more are for prompts, and start from nothing."""

    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        return super().start(state if hidden.shape[1] <= 64 else None, hidden)


class OtherInLongCalls(Mixer):
    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden * (1 + (hidden.shape[1] > 64)), *args, **kwargs)


class RoundsManyTokens(Mixer):
    """Another formula for many tokens, which is the same but for rounding: in bfloat16 by an eighth of most outputs."""

    def result(self, outputs: Tensor, state: Tensor, gate: Any) -> Any:
        return outputs if outputs.shape[1] == 1 else outputs + 64 - 64


class Overflows(Mixer):
    def result(self, outputs: Tensor, state: Tensor, gate: Any) -> Any:
        return outputs * 1e6


class MixesRequests(Mixer):
    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        state = super().start(state, hidden)
        return state.mean(0, keepdim=True).expand_as(state)


class LooksAtItsRows(MixesRequests):
    def note(self, cache: ToyCache, hidden: Tensor) -> None:
        assert hidden.isfinite().all()


class Forgets(Mixer):
    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        return super().start(None, hidden)


class Counts(Mixer):
    def note(self, cache: ToyCache, hidden: Tensor) -> None:
        cache.seen += hidden.shape[1]


class KeepsKeys(Mixer):
    def note(self, cache: ToyCache, hidden: Tensor) -> None:
        cache.update(hidden[:, None], hidden[:, None], self.index)


class TwoOutputs(Mixer):
    """Returns two tensors per token of different shapes."""

    def result(self, outputs: Tensor, state: Tensor, gate: Any) -> Any:
        return (outputs + 1)[..., None].expand(*outputs.shape, 2).contiguous(), outputs


class Nested(Mixer):
    """Has a state of its own and a submodule with another one."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.inner = Mixer(index + 5)

    def forward(self, hidden: Tensor, cache: ToyCache | None = None, gate: Any = None, flag: bool = False) -> Any:
        return super().forward(self.inner(hidden, cache=cache), cache)


class OnlyKeys(Mixer):
    """Attention, for the purpose of a cache."""

    def forward(self, hidden: Tensor, cache: ToyCache | None = None, gate: Any = None, flag: bool = False) -> Any:
        if cache is not None:
            cache.update(hidden[:, None], hidden[:, None], self.index)
        return hidden.cumsum(1)


class Toy(nn.Module):
    config = types.SimpleNamespace(use_cache=True)

    def __init__(self, *mixers: type[Mixer], rounds: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rounds = nn.Embedding(20, 6), rounds
        self.mixers = nn.ModuleList(mixer(index) for index, mixer in enumerate(mixers))

    def forward(self, input_ids: Tensor, cache: ToyCache | None = None, use_cache: bool = False) -> Tensor:
        hidden = self.embed(input_ids)
        cache = ToyCache() if use_cache and cache is None else cache
        for mixer in [*self.mixers] * self.rounds:
            result = mixer(hidden, cache=cache, gate=(hidden, hidden.sin()), flag=True)
            hidden = hidden + (result[1] if isinstance(result, tuple) else result)
        return hidden


def inputs_of(length: int) -> dict[str, Any]:
    return {"input_ids": torch.arange(length)[None] % 7}


def states_of(toy: Toy) -> list[tuple[str, bool, bool]]:
    return [(layer.spec.module, layer.chunks, layer.batches) for layer in find_recurrent_layers(toy, inputs_of)]


def test_only_fixed_sizes_are_states() -> None:
    toy = Toy(OnlyKeys, Mixer, OnlyKeys, Mixer)
    assert states_of(toy) == [("mixers.1", True, True), ("mixers.3", True, True)]
    assert recurrent_modules(toy, inputs_of) == ["mixers.1", "mixers.3"]
    assert find_recurrent_layers(toy, inputs_of)[0].spec.states == (StateSpec("sums[1]", (6,), torch.float32),)
    assert states_of(Toy(OnlyKeys)) == []


def test_a_layer_that_ignores_its_state_in_chunks_is_fed_token_by_token() -> None:
    assert states_of(Toy(Mixer, ForgetsInChunks)) == [("mixers.0", True, True), ("mixers.1", False, True)]


def test_a_layer_that_ignores_its_state_in_long_chunks_is_fed_token_by_token() -> None:
    layers = find_recurrent_layers(Toy(Mixer, ForgetsInLongChunks, ForgetsInChunks), inputs_of)
    assert [layer.chunks for layer in layers] == [True, True, False]
    assert [layer.chunks for layer in with_long_chunks(layers)] == [True, False, False]


def test_another_result_of_many_tokens_than_of_each_is_refused() -> None:
    layers = find_recurrent_layers(Toy(Mixer, OtherInLongCalls), inputs_of)
    with pytest.raises(UnsupportedError, match=r"mixers.1 keeps .* another result token by token than for 80 tokens at once"):
        with_long_chunks(layers)


def test_two_forms_that_only_rounding_moves_apart_are_one() -> None:
    toy = Toy(Mixer, RoundsManyTokens).bfloat16()
    layers = find_recurrent_layers(toy, inputs_of)
    assert layers[1].own_error > FORMULAS_APART
    assert len(with_long_chunks(layers)) == 2
    with pytest.raises(UnsupportedError, match=r"mixers.1 keeps .* another result token by token than for 11 tokens at once"):
        find_recurrent_layers(Toy(Mixer, Forgets).bfloat16(), inputs_of)


class RoundsAndMixes(MixesRequests):
    def result(self, outputs: Tensor, state: Tensor, gate: Any) -> Any:
        return outputs if outputs.shape[1] == 1 else outputs + 256 - 256


class RoundsAndForgets(RoundsAndMixes):
    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        return Mixer.start(self, state if hidden.shape[1] == 1 else None, hidden)


def test_rounding_that_moves_two_forms_apart_hides_no_mistake() -> None:
    _, mixing, forgetting = find_recurrent_layers(Toy(Mixer, RoundsAndMixes, RoundsAndForgets).bfloat16(), inputs_of)
    assert min(mixing.own_error, forgetting.own_error) > 2 * FORMULAS_APART
    assert (mixing.batches, mixing.mapped, mixing.chunks) == (True, True, True)
    assert (forgetting.batches, forgetting.mapped, forgetting.chunks) == (True, False, False)


def test_a_layer_whose_own_numbers_overflow_is_refused_for_that() -> None:
    words = r"mixers.1 itself gives numbers that are infinite or NaN in float16, whose largest is 6.55e\+04; .* load the model in bfloat16"
    with pytest.raises(UnsupportedError, match=words):
        find_recurrent_layers(Toy(Mixer, Overflows).half(), inputs_of)


def test_a_layer_with_state_inside_another_is_run_by_the_outer_one() -> None:
    (layer,) = find_recurrent_layers(Toy(Nested), inputs_of)
    assert layer.spec.module == "mixers.0" and [state.name for state in layer.spec.states] == ["sums[0]", "sums[5]"]


def test_a_layer_that_mixes_requests_is_mapped_over_them() -> None:
    (layer,) = find_recurrent_layers(Toy(MixesRequests), inputs_of)
    assert (layer.chunks, layer.batches, layer.mapped) == (True, True, True)


def test_one_that_can_not_be_mapped_steps_alone() -> None:
    assert states_of(Toy(LooksAtItsRows)) == [("mixers.0", True, False)]


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (Forgets, "mixers.1 keeps recurrent state, but its own forward gives another result token by token"),
        (Counts, "mixers.1 keeps recurrent state, .* it counts in seen: 3 after 3 tokens, 11 after 11"),
        (KeepsKeys, r"mixers.1 keeps recurrent state, .* it keeps layers\[1\]\.keys and layers\[1\]\.values, which grow with the tokens"),
    ],
)
def test_refusals(mixer: type[Mixer], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        find_recurrent_layers(Toy(OnlyKeys, mixer), inputs_of)


def test_a_shared_layer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="runs more than once"):
        find_recurrent_layers(Toy(Mixer, rounds=2), inputs_of)


@pytest.mark.parametrize("window", [2, 3, 4])
def test_a_window_of_few_tokens_is_no_state(window: int) -> None:
    """Its cache holds as much after 3 tokens as after 11."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = MistralForCausalLM(MistralConfig(vocab_size=32, sliding_window=window, **sizes)).eval()
    assert find_recurrent_layers(model, inputs_of) == ()


def test_models_without_a_cache_have_no_layers() -> None:
    assert find_recurrent_layers(nn.Linear(2, 2), inputs_of) == ()
    assert find_recurrent_layers(build("llama"), inputs_of) == ()


@pytest.mark.parametrize(
    "mixers", [(Mixer,), (OnlyKeys, Gated), (ForgetsInChunks, MixesRequests, Mixer), (LooksAtItsRows,), (TwoOutputs, Nested)]
)
def test_a_ragged_batch_equals_each_prompt_alone(mixers: tuple[type[Mixer], ...]) -> None:
    """Chunks, decode rows, a fresh request of one token and padding, on slots in any order among NaN."""
    torch.manual_seed(1)
    for layer in find_recurrent_layers(Toy(*mixers), inputs_of):
        prompts = [torch.randn(len(layer.operands), n, 6) for n in (9, 4, 6, 1)]
        expected = [layer.run([part[None] for part in prompt], None)[0][0] for prompt in prompts]
        pool = StatePool([layer.spec], 7)
        pool.fill(float("nan"))
        runner, slots = RecurrentRunner([layer], pool), [4, 1, 5, 2]
        done, got = [0, 0, 0, 0], [[] for _ in prompts]
        for counts in ((5, 1, 3, 0), (1, 1, 0, 0), (3, 1, 1, 1), (0, 1, 2, 0)):
            active = [i for i, count in enumerate(counts) if count]
            requests = [BatchRequest([1] * counts[i], [1, 2, 3], done[i], state_slot=slots[i]) for i in active]
            if not any(done):
                requests[0] = requests[0]._replace(checkpoints=[StateCheckpoint(2, 3), StateCheckpoint(3, 6)])
            batch = Batch.build(requests, 4)
            rows = [torch.cat([prompts[i][part, done[i] : done[i] + counts[i]] for i in active]) for part in range(len(layer.operands))]
            inputs = [torch.cat([value, torch.full((2, 6), float("nan"))])[None] for value in rows]
            output = torch.full((1, inputs[0].shape[1], *expected[0].shape[1:]), 7.0)
            runner.forward(runner.plan(batch), 0, inputs, output)
            assert not output[0, -2:].any(), "padding"
            for i, part in zip(active, output[0, :-2].split([counts[i] for i in active]), strict=True):
                got[i].append(part)
                done[i] += counts[i]
        for one, parts in zip(expected, got, strict=True):
            torch.testing.assert_close(torch.cat(parts), one)
        for tokens, slot in ((2, 3), (3, 6)):
            before = layer.run([part[None, :tokens] for part in prompts[0]], None)[1]
            for kept, expected_state in zip(pool.states(0), before, strict=True):
                torch.testing.assert_close(kept[slot], expected_state[0])


def test_a_step_copies_once_what_layers_read_in_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    (layer,) = find_recurrent_layers(Toy(Mixer), inputs_of)
    runner, copies, copy = RecurrentRunner([layer], StatePool([layer.spec], 3)), [], packed_ints.copy_to_device
    monkeypatch.setattr(packed_ints, "copy_to_device", lambda *given: copies.append(given) or copy(*given))
    for tokens in (3, 9):
        copies.clear()
        extends = runner.plan(Batch.build([BatchRequest([1] * tokens, [1, 2, 3], state_slot=1)], 4)).calls[0].extends
        assert extends.rows.tolist() == list(range(tokens)) and extends.bounds(4)[1][:, 1].sum() == tokens
    assert len(copies) == 1


@pytest.mark.parametrize("slots", [(0, 1), (1, 1), (1, 3)])
def test_slots_must_be_the_requests_own(slots: tuple[int, int]) -> None:
    (layer,) = find_recurrent_layers(Toy(Mixer), inputs_of)
    batch = Batch.build([BatchRequest([1], [1], state_slot=slot) for slot in slots], 4)
    with pytest.raises(ContextError, match=r"state slots \[.*\]; allowed are 1 to 2, each once"):
        RecurrentRunner([layer], StatePool([layer.spec], 3)).plan(batch)


@pytest.mark.parametrize("slot", [0, 1, 3])
def test_so_must_those_of_checkpoints(slot: int) -> None:
    (layer,) = find_recurrent_layers(Toy(Mixer), inputs_of)
    batch = Batch.build([BatchRequest([1, 1], [1], state_slot=1, checkpoints=[StateCheckpoint(1, slot)])], 4)
    with pytest.raises(ContextError, match=rf"state slots \[1, {slot}\]; allowed are 1 to 2, each once"):
        RecurrentRunner([layer], StatePool([layer.spec], 3)).plan(batch)


@pytest.mark.parametrize("tokens", [(0,), (3,), (2, 2), (2, 1)])
def test_checkpoints_lie_on_the_way(tokens: tuple[int, ...]) -> None:
    (layer,) = find_recurrent_layers(Toy(Mixer), inputs_of)
    checkpoints = [StateCheckpoint(each, 2 + i) for i, each in enumerate(tokens)]
    batch = Batch.build([BatchRequest([1], [2], 1, state_slot=4), BatchRequest([1] * 3, [1], state_slot=1, checkpoints=checkpoints)], 4)
    with pytest.raises(ContextError, match=r"request 1 of the batch has 3 new tokens and checkpoints after .*; allowed are numbers from 1"):
        RecurrentRunner([layer], StatePool([layer.spec], 5)).plan(batch)


@pytest.mark.parametrize("name", RECURRENT)
def test_replaced_modules_compute_the_same_when_they_are_called(name: str) -> None:
    """Only a trace sees the ops; an instance's own forward comes back too."""
    model = recurrent(name)
    ids = torch.arange(2, 11)[None]
    layers = find_recurrent_layers(model, lambda n: {"input_ids": ids[:, :n] if n <= 9 else ids.repeat(1, 2)[:, :n]})
    assert layers and all(layer.batches for layer in layers)
    assert {layer.chunks for layer in layers} == {name not in STEPWISE}
    own = types.MethodType(type(layers[0].module).forward, layers[0].module)
    layers[0].module.forward = own  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            before = model(input_ids=ids).logits
            with replaced_by_ops(layers):
                assert all("forward" in vars(layer.module) for layer in layers)
                torch.testing.assert_close(model(input_ids=ids).logits, before)
        assert layers[0].module.forward is own
        assert not any("forward" in vars(layer.module) for layer in layers[1:])
    finally:
        del layers[0].module.forward


class Scaled(Mixer):
    """Keeps its place in the cache in the attribute in which models keep a layer's number."""

    index = property(lambda self: self.layer_idx, lambda self, value: setattr(self, "layer_idx", value))

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale, self.weight = 1.0, nn.Parameter(torch.randn(6))
        self.register_buffer("shift", torch.zeros(6))

    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        return super().start(state if self.scale == 1.0 or hidden.shape[1] == 1 else None, hidden)

    def result(self, outputs: Tensor, state: Tensor, gate: Any) -> Any:
        return outputs * self.weight + self.shift


def forwarded(mixer: Mixer) -> None:
    forward = mixer.forward
    mixer.forward = lambda *args, **kwargs: forward(*args, **kwargs)  # type: ignore[method-assign]


OTHERS: dict[str, Callable[[Scaled], Any]] = {
    "an attribute": lambda mixer: setattr(mixer, "scale", 2.0),
    "a function": lambda mixer: setattr(mixer, "activation", lambda x: x),
    "a list": lambda mixer: setattr(mixer, "limits", [0, 1]),
    "a buffer": lambda mixer: mixer.shift.fill_(1.0),
    "a tensor": lambda mixer: setattr(mixer, "table", torch.ones(2)),
    "a hook": lambda mixer: mixer.register_forward_hook(lambda *_: None),
    "a forward": forwarded,
    "a dtype": lambda mixer: mixer.double(),
    "a shape": lambda mixer: setattr(mixer, "weight", nn.Parameter(torch.randn(1, 6))),
    "a note on a weight": lambda mixer: setattr(mixer.weight, "note", True),
    "a part": lambda mixer: setattr(mixer, "part", nn.SiLU()),
    "its mode": lambda mixer: mixer.eval(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_a_layers_code_can_see_makes_a_kind_of_its_own(name: str) -> None:
    toy = Toy(Scaled, Scaled, Scaled)
    first, second, third = find_recurrent_layers(toy, inputs_of)
    assert kind_of(first) == kind_of(second), "other weights, and another number"
    OTHERS[name](toy.mixers[1])
    assert kind_of(first) == kind_of(third) != kind_of(second)


def test_only_one_layer_of_a_kind_is_run_in_all_forms_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    toy, tried = Toy(Scaled, Scaled, Scaled, Scaled), []
    toy.mixers[2].scale = 2.0
    original = discover.verified
    monkeypatch.setattr(discover, "verified", lambda layer: (tried.append(layer.spec.module), original(layer))[1])
    assert states_of(toy) == [(f"mixers.{i}", i != 2, True) for i in range(4)]
    assert tried == ["mixers.0", "mixers.2"]


class ForgetsInLayerOne(Scaled):
    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        return super().start(state if self.layer_idx != 1 else None, hidden)


def test_a_layer_that_reads_its_number_is_not_taken_for_another() -> None:
    toy = Toy(ForgetsInLayerOne, ForgetsInLayerOne)
    with pytest.raises(UnsupportedError, match=r"mixers.1 keeps .* another result token by token than for 11 tokens at once"):
        find_recurrent_layers(toy, inputs_of)


class ForgetsChunksInLayerOne(Scaled):
    def start(self, state: Tensor | None, hidden: Tensor) -> Tensor:
        return super().start(state if self.layer_idx != 1 or hidden.shape[1] == 1 else None, hidden)


def test_a_layer_that_takes_no_chunks_because_of_its_number_is_fed_token_by_token() -> None:
    assert states_of(Toy(ForgetsChunksInLayerOne, ForgetsChunksInLayerOne)) == [("mixers.0", True, True), ("mixers.1", False, True)]


def test_what_changed_in_a_cache() -> None:
    kept, written, nan = torch.zeros(2), torch.zeros(2), float("nan")
    cache = types.SimpleNamespace(kept=kept, written=written, put=torch.zeros(2), count=1, kind=1, same=nan, items=[1])
    before = snapshot(cache)
    written.add_(1)
    cache.put, cache.count, cache.kind, cache.new = torch.zeros(2), 2, True, None
    cache.items.append(2)
    changed = {name_of(path) for path in changed_paths(before, snapshot(cache))}
    assert changed == {"written", "put", "count", "kind", "new", "items", "items[1]"}
