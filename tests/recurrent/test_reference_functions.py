"""With a package such as flash-linear-attention installed, transformers' functions say what a layer computes."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from paged_attn import LLM, SamplingParams, explain
from paged_attn.calling.reference_functions import reference_functions
from tests.oracle import greedy, random_prompts
from tests.recurrent_models import recurrent

NAME = "torch_chunk_gated_delta_rule"
PACKAGE = "less_exact_kernels"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Qwen3-Next whose prompts go through a package's kernel, chosen by transformers' decorator, that is off by a few percent."""
    found = recurrent("qwen3_next")
    module = sys.modules[type(found).__module__]
    own = inspect.unwrap(getattr(module, NAME))

    def chunk_gated_delta_rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **more: Any) -> Any:
        output, state = own(query, key, value, g=g, beta=beta, **more)
        return output * 1.05, state

    chunk_gated_delta_rule.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    package = types.ModuleType(PACKAGE)
    package.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, PACKAGE, package)
    monkeypatch.setattr(module, NAME, use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", PACKAGE)(own))
    yield found


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(1, 9)[None], use_cache=False).logits
    return result


def test_tokens_are_those_of_the_reference(model: Any) -> None:
    prompts = random_prompts((9, 1, 70), seed=3)
    chosen = getattr(sys.modules[type(model).__module__], NAME)
    with reference_functions(model):
        expected = [greedy(model, prompt, 6) for prompt in prompts]
    with LLM(model, page_size=4, num_pages=100, max_batch_tokens=32) as llm:
        assert "by ops on the slots of its state (short_conv, gated_delta_rule)" in explain(llm)
        answers = [completion.token_ids for completion in llm.generate(prompts, SamplingParams(max_new_tokens=6))]
    assert answers == expected
    assert getattr(sys.modules[type(model).__module__], NAME) is chosen, "as it was"


def test_until_the_last_of_those_who_compare_is_done(model: Any) -> None:
    package = logits(model)
    first, second = reference_functions(model), reference_functions(model)
    with first:
        exact = logits(model)
        second.__enter__()
    assert not torch.allclose(exact, package, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(logits(model), exact, rtol=0, atol=0)
    second.__exit__(None, None, None)
    torch.testing.assert_close(logits(model), package, rtol=0, atol=0)
