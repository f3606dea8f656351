"""Whatever goes wrong in what is served is seen in every dtype, named, and told from rounding; nothing is seen where nothing is wrong.

All families, dtypes and wrappers: `python -m tests.check --report`, docs/self_check.md.
"""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from tests.check.checked import Hooked, Traced, refused
from tests.check.planted import applicable, hook_a_row
from tests.zoo.build import build

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ERRORS = {
    "llama": {"scale", "position", "page"},
    "gemma2": {"scale", "position", "page", "window", "softcap"},
    "gpt_oss": {"scale", "position", "page", "window", "sinks"},
    "bloom": {"scale", "page"},
}
WORDS = {
    "scale": r"the attention of layer 0 .*was recognised wrongly",
    "window": r"the attention of layer \d .*was recognised wrongly",
    "softcap": r"the attention of layer 0 .*was recognised wrongly",
    "sinks": r"the attention of layer 0 ",
    "page": r"the attention of layer \d ",
    "position": r"",
}


@cache
def traced(name: str, dtype: torch.dtype) -> Traced:
    return Traced(build(name, num_hidden_layers=2).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ERRORS)
class TestOfTracedModels:
    def test_nothing_is_wrong_with_the_model_as_it_is(self, name: str, dtype: torch.dtype) -> None:
        assert refused(traced(name, dtype)) == ""

    def test_every_planted_error_is_seen_and_named(self, name: str, dtype: torch.dtype) -> None:
        checked = traced(name, dtype)
        assert ERRORS[name] <= set(applicable(checked.specs))
        for error in sorted(ERRORS[name]):
            words = refused(checked, error)
            assert words.startswith("self-check failed: "), f"{error} is not seen"
            assert re.search(WORDS[error], words), words
            assert "(allowed " in words and "rounding alone does" in words


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_row_that_a_hook_changes_is_seen(dtype: torch.dtype) -> None:
    model = build("llama", num_hidden_layers=2).to(dtype)
    assert hook_a_row(model)
    words = refused(Traced(model))
    assert "computes other numbers for a token if the batch has other requests" in words and "forward hooks" in words


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gpt_oss", "mistral"])
def test_of_hooked_models_too(name: str, dtype: torch.dtype) -> None:
    checked = Hooked(build(name, num_hidden_layers=2).to(dtype))
    assert refused(checked) == ""
    for error in sorted(set(applicable(checked.specs)) - {"row", "position"}):
        words = refused(checked, error)
        assert words.startswith("self-check failed: the attention of layer "), f"{error} is not seen"
    words = refused(checked, "position")
    assert words.startswith("self-check failed: what is served computes something else in query of attention 0 (model.layers.0")
