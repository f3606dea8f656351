"""The Hugging Face hook: agrees with the graph rewrite, drops nothing, restores the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from paged_attn import Batch, BatchRequest, KVPool, PagedCache, UnsupportedError, forward_context, patch
from paged_attn.attn_ops.errors import ContextError
from paged_attn.hf.cache_name import CACHE_NAME
from paged_attn.hf.mask import prove_mask_function
from paged_attn.passes.prove.mask_family import MaskFamily
from tests.tiny_models import build

REFUSED = {"falcon": "AttentionInterface", "llama4_text": "self-check failed"}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_the_hook_would_get_wrong_and_restores(name: str) -> None:
    model, ids = build(name), torch.tensor([[5, 6, 7, 8]])
    before = model(ids).logits
    with pytest.raises(UnsupportedError, match=REFUSED[name]), patch(model):
        pass
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, before)


def test_outside_a_context_the_model_is_unchanged_and_after_it_restored() -> None:
    model, ids = build("gemma3_text"), torch.randint(2, 96, (2, 21))
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    before = model(ids).logits
    with pytest.raises(RuntimeError, match="boom"), patch(model):
        assert torch.equal(model(ids).logits, before)
        assert model.config._attn_implementation == "paged_attn"
        raise RuntimeError("boom")
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, before)
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}


def test_patching_twice_is_an_error() -> None:
    model = build("llama")
    first = patch(model)
    with first:
        with pytest.raises(ContextError, match="patched already"), patch(model):
            pass
        with pytest.raises(ContextError, match="patched already"):
            first.__enter__()
        assert model.config._attn_implementation == "paged_attn"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["wrapped", "in place", "forward", "a layer"])
def test_compiled_models_are_refused_before_anything_runs(kind: str) -> None:
    """Inductor's code for one of them ended the process."""
    model = build("qwen3")
    if kind == "in place":
        model.compile()
    elif kind == "forward":
        model.forward = torch.compile(model.forward)
    elif kind == "a layer":
        model.model.layers[1].compile()
    where = "the module model.layers.1 of " * (kind == "a layer")
    with pytest.raises(UnsupportedError, match=f"^{where}Qwen3ForCausalLM is compiled, and"):
        patch(torch.compile(model) if kind == "wrapped" else model)


def test_what_a_paged_batch_does_not_have_is_refused_under_a_context() -> None:
    model, ids = build("llama"), torch.tensor([[5, 6, 7, 8, 9]])
    batch = Batch.build([BatchRequest(ids[0].tolist(), [1, 2])], 4)
    with torch.no_grad(), patch(model) as patched:
        pool = KVPool(patched.layers, 4, 4, torch.float32)
        for hole in (torch.tensor([[1, 1, 0, 1, 1]]), torch.zeros(1, 1, 5, 5)):
            with pytest.raises(UnsupportedError, match="has an attention_mask"), forward_context(batch, pool):
                model(**batch.model_inputs(), attention_mask=hole)
        with pytest.raises(ContextError, match="has page 7; allowed are 1 to 3"):
            forward_context(Batch.build([BatchRequest(ids[0].tolist(), [1, 7])], 4), pool)
        past = DynamicCache(config=model.config)
        model(ids, **{CACHE_NAME: past})
        for given in ({**batch.model_inputs(), CACHE_NAME: past}, {"input_ids": ids.expand(2, -1)}):
            with (
                pytest.raises(UnsupportedError, match=r"call model\(\*\*batch.model_inputs\(\)\), without a cache"),
                forward_context(batch, pool),
            ):
                model(**given)
        with forward_context(batch, pool):
            logits = model(**batch.model_inputs(), attention_mask=torch.ones_like(ids)).logits
        assert torch.allclose(logits[:, :5], model(ids).logits, atol=1e-5)


def test_a_copy_that_was_made_inside_a_patch_has_weights_of_its_own() -> None:
    model, ids = build("llama"), torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), patch(model) as patched:
        PagedCache(patched)  # asks the cache first, from now on
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other.set_attn_implementation("sdpa")
    clean = build("llama")
    clean.load_state_dict(other.state_dict())
    assert torch.equal(other(ids).logits, clean(ids).logits) and not torch.equal(other(ids).logits, model(ids).logits)


def test_an_unknown_keyword_is_never_dropped() -> None:
    model = build("llama")
    attention = model.model.layers[1].self_attn
    forward = type(attention).forward
    attention.forward = lambda *args, **kwargs: forward(attention, *args, **kwargs, extra_bias=torch.ones(1))
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn passes extra_bias"), patch(model):
        pass


def test_a_plain_module_is_sent_to_the_other_road() -> None:
    with pytest.raises(UnsupportedError, match=r"one of its models, and Linear is not one\. LLM\(model\) and torch\.compile"):
        patch(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "family",
    [
        MaskFamily(True),
        MaskFamily(True, 1),
        MaskFamily(True, 4096),
        MaskFamily(True, None, 8192),
        MaskFamily(True, 5, 16),
        MaskFamily(False),
    ],
)
def test_mask_functions_are_proved(family: MaskFamily) -> None:
    def function(batch, head, query, key):
        seen = key <= query if family.causal else key >= 0
        if family.window is not None:
            seen = seen & (query - key < family.window)
        return seen & (query // family.chunk == key // family.chunk) if family.chunk is not None else seen

    assert prove_mask_function(function) == family


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: (k <= q) & ((q - k) % 3 == 0),
        lambda b, h, q, k: (k <= q) | (k < 7),
        lambda b, h, q, k: (k <= q) & ((q < 150000) | (q - k < 9)),
    ],
)
def test_other_mask_functions_are_refused(function) -> None:
    with pytest.raises(UnsupportedError, match="a mask that the model builds: its attention mask cannot be proved"):
        prove_mask_function(function)
