"""An engine of one's own on torch.compile(model, backend="paged_attn") serves models with recurrent state by `RecurrentStates`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import paged_attn
from paged_attn import Batch, BatchRequest, KVPool, PageAllocator, RecurrentStates, UnsupportedError, forward_context
from paged_attn.attn_ops.errors import ContextError
from tests.oracle import greedy
from tests.recurrent_models import recurrent
from tests.tiny_models import build

PAGE_SIZE, NEW = 16, 6
PROMPTS = [list(range(5, 30)), [7, 8, 9], list(range(40, 57)), [3] * 16]


class Running:
    """One request: its tokens, its pages and its slot, and how many of its tokens are computed."""

    def __init__(self, prompt: list[int], pages: PageAllocator, states: RecurrentStates) -> None:
        self.tokens, self.end, self.computed = list(prompt), len(prompt) + NEW, 0
        self.pages, self.slot = pages.allocate(pages.pages_for(self.end)), states.slots.allocate()

    def share(self, most: int) -> BatchRequest:
        return BatchRequest(self.tokens[self.computed : self.computed + most], self.pages, self.computed, state_slot=self.slot)


@contextmanager
def states_for(model: nn.Module, slots: int = 4) -> Iterator[RecurrentStates]:
    """Fewer slots than prompts, and what lay in them is NaN."""
    states = RecurrentStates(model, slots)
    states.pool.fill(float("nan"))
    try:
        yield states
    finally:
        states.close()


def generated(compiled: nn.Module, states: RecurrentStates, chunk: int) -> list[list[int]]:
    """Greedy tokens of `PROMPTS`: a request joins when a slot is free, prompts go chunk by chunk beside others that decode."""
    pool = KVPool(paged_attn.attention_layers(compiled), num_pages=32, page_size=PAGE_SIZE, dtype=torch.float32, device=states.device)
    pages = PageAllocator(pool.num_pages, PAGE_SIZE)
    waiting, running, done = list(PROMPTS), list[Running](), dict[int, list[int]]()
    while waiting or running:
        while waiting and states.slots.num_free:
            running.append(Running(waiting.pop(0), pages, states))
        batch = Batch.build([each.share(chunk) for each in running], PAGE_SIZE, states.device)
        with torch.no_grad(), forward_context(batch, pool, states=states):
            logits = compiled(**batch.model_inputs()).logits[0]
        for request, token in zip(running, logits[batch.logits_rows[: batch.num_logits]].argmax(-1).tolist(), strict=True):
            request.computed = min(request.computed + chunk, len(request.tokens))
            if request.computed == len(request.tokens):
                request.tokens.append(token)
        for request in [each for each in running if len(each.tokens) == each.end]:
            running.remove(request)
            pages.free(request.pages)
            states.slots.free(request.slot)
            prompt = request.tokens[:-NEW]
            done[PROMPTS.index(prompt)] = request.tokens[-NEW:]
    return [done[index] for index in range(len(PROMPTS))]


@pytest.fixture(autouse=True)
def few_compiles() -> None:
    """Dynamo gives up a call of transformers after eight compiles, whichever models they were of."""
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "jamba", "lfm2"])
def test_tokens_are_the_models(name: str) -> None:
    model = recurrent(name)
    compiled = torch.compile(model, backend="paged_attn")
    ids = torch.arange(2, 22).view(2, 10)
    with states_for(model) as states, torch.no_grad():
        assert generated(compiled, states, chunk=10) == [greedy(model, prompt, NEW) for prompt in PROMPTS]
        torch.testing.assert_close(compiled(input_ids=ids).logits, model(input_ids=ids).logits)  # what it is outside a context


@pytest.mark.parametrize("inline", [True, False])
def test_a_layer_that_calls_no_known_function(inline: bool, minimax: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recurrence is an op, or else its own forward is."""
    if not inline:
        monkeypatch.setattr("paged_attn.recurrent.states.with_ops", lambda layers, backend: layers)
    with states_for(minimax) as states:
        assert all(bool(layer.ops) == inline for layer in states.layers)
        tokens = generated(torch.compile(minimax, backend="paged_attn"), states, chunk=64)
    assert tokens == [greedy(minimax, prompt, NEW) for prompt in PROMPTS]


def test_a_context_without_them_is_refused() -> None:
    model, batch = recurrent("lfm2"), Batch.build([BatchRequest([5, 6, 7], [1], state_slot=1)], PAGE_SIZE)
    compiled = torch.compile(model, backend="paged_attn")
    with states_for(model), torch.no_grad():
        pool = KVPool(paged_attn.attention_layers(compiled), 4, PAGE_SIZE, torch.float32)
        with forward_context(batch, pool), pytest.raises(ContextError, match=r"2 layers with recurrent state.*states=states"):
            compiled(**batch.model_inputs())


def test_those_of_another_model_are_refused() -> None:
    model, other = recurrent("lfm2"), recurrent("lfm2", seed=1)
    compiled, batch = torch.compile(model, backend="paged_attn"), Batch.build([BatchRequest([5, 6, 7], [1], state_slot=1)], PAGE_SIZE)
    with states_for(model), states_for(other) as others, torch.no_grad():
        pool = KVPool(paged_attn.attention_layers(compiled), 4, PAGE_SIZE, torch.float32)
        with forward_context(batch, pool, states=others), pytest.raises(ContextError, match="made for this model"):
            compiled(**batch.model_inputs())


def test_a_batch_without_slots_is_refused() -> None:
    model, batch = recurrent("lfm2"), Batch.build([BatchRequest([5, 6, 7], [1])], PAGE_SIZE)
    with states_for(model) as states, pytest.raises(ContextError, match="slots"):
        with forward_context(batch, KVPool([], 4, PAGE_SIZE, torch.float32), backend="torch_native", states=states):
            pass


def test_a_model_without_such_layers_needs_none() -> None:
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no layer with recurrent state; leave RecurrentStates and states= out"):
        RecurrentStates(build("llama"), 4)


def test_a_model_has_them_once_and_is_what_it_was_afterwards() -> None:
    model = recurrent("lfm2")
    before = [vars(module).get("forward") for module in model.modules()]
    with states_for(model), pytest.raises(ValueError, match="already has RecurrentStates; close them first"):
        RecurrentStates(model, 4)
    assert [vars(module).get("forward") for module in model.modules()] == before
    with states_for(model):
        pass


def test_two_models_of_a_class_may_be_closed_in_any_order() -> None:
    import transformers.models.lfm2.modeling_lfm2 as file

    before = file.causal_conv1d_fn
    first, second = RecurrentStates(recurrent("lfm2"), 4), RecurrentStates(recurrent("lfm2", seed=1), 4)
    first.close()
    assert file.causal_conv1d_fn is not before
    second.close()
    assert file.causal_conv1d_fn is before


def test_two_models_of_a_class_and_states_made_anew_have_graphs_of_their_own() -> None:
    models = recurrent("lfm2"), recurrent("lfm2", seed=1)
    first, second = (torch.compile(model, backend="paged_attn") for model in models)
    expected = [[greedy(model, prompt, NEW) for prompt in PROMPTS] for model in models]
    with states_for(models[0]) as states, states_for(models[1]) as others:
        assert [generated(first, states, 10), generated(second, others, 10)] == expected
    with states_for(models[0]) as anew:
        assert generated(first, anew, 10) == expected[0]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_a_deepcopy_computes_with_its_own_weights(name: str) -> None:
    model, ids = recurrent(name), torch.arange(2, 12)[None]
    with states_for(model), torch.no_grad():
        copied, expected = copy.deepcopy(model), copy.deepcopy(model.state_dict())
        for parameter in copied.parameters():
            parameter.mul_(1.5)
        other = type(model)(model.config).eval()
        other.load_state_dict({key: value * 1.5 for key, value in expected.items()})
        torch.testing.assert_close(copied(input_ids=ids).logits, other(input_ids=ids).logits)


def test_a_model_that_torch_compile_gave_up_is_no_silent_mistake() -> None:
    model, batch = recurrent("lfm2"), Batch.build([BatchRequest([5, 6, 7], [1], state_slot=1)], PAGE_SIZE)
    compiled = torch.compile(model, backend="paged_attn")
    with states_for(model) as states, torch.no_grad():
        pool = KVPool(paged_attn.attention_layers(compiled), 4, PAGE_SIZE, torch.float32)
        with pytest.raises(ContextError, match="nothing ran on pages in this forward context"):
            with torch.compiler.set_stance("force_eager"), forward_context(batch, pool, states=states):
                compiled(**batch.model_inputs())


@pytest.mark.parametrize("slots", [(0, 1), (1, 1), (1, 4), (1, -1)])
def test_slots_that_are_not_the_requests_own_are_refused(slots: tuple[int, int]) -> None:
    requests = [BatchRequest([5, 6], [page], state_slot=slot) for page, slot in enumerate(slots, 1)]
    batch, pool = Batch.build(requests, PAGE_SIZE), KVPool([], 4, PAGE_SIZE, torch.float32)
    with states_for(recurrent("lfm2")) as states, pytest.raises(ContextError, match=r"allowed are 1 to 3, each once"):
        with forward_context(batch, pool, backend="torch_native", states=states):
            pass


def test_states_for_a_model_that_was_called_before_and_closing_twice() -> None:
    model = recurrent("lfm2")
    compiled, ids = torch.compile(model, backend="paged_attn"), torch.arange(2, 12)[None]
    with torch.no_grad():
        compiled(input_ids=ids)
    old = RecurrentStates(model, 4)
    old.close()
    with states_for(model) as states:
        old.close()
        assert generated(compiled, states, 10) == [greedy(model, prompt, NEW) for prompt in PROMPTS]


def test_explain_of_a_model_that_was_not_compiled_says_which_ops_it_would_run() -> None:
    assert "by ops on the slots of its state (short_conv)" in paged_attn.explain(recurrent("lfm2"))


@pytest.fixture
def minimax() -> PreTrainedModel:
    from tests.zoo.build import build as build_of_zoo

    return build_of_zoo("minimax")
