"""`generate` of transformers, as its users call it: `custom_generate=paged_attn.generate` on the demo model."""

from __future__ import annotations

import copy
from importlib.resources import files
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import paged_attn


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    path = str(files("paged_attn.demo_model"))
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tokenizer


@pytest.mark.slow
def test_a_batch_of_texts(demo: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = demo
    inputs = tokenizer(["She had never", "It was a truth universally acknowledged, that", "Mr."], return_tensors="pt", padding=True)
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False, custom_generate=paged_attn.generate)
    assert tokens.equal(expected)
    assert tokenizer.batch_decode(tokens, skip_special_tokens=True)[0].startswith("She had never")
    one = tokenizer("She had never", return_tensors="pt")
    own = model.generate(**one, max_new_tokens=8, do_sample=False)
    assert model.generate(
        **one, max_new_tokens=8, do_sample=False, streamer=TextStreamer(tokenizer), custom_generate=paged_attn.generate
    ).equal(own)
    assert capsys.readouterr().out.strip() == tokenizer.decode(own[0])
    assert "attention layers rewritten" in paged_attn.explain(paged_attn.engine_of(model))


def test_beams_are_refused_with_the_way_that_has_them(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    with pytest.raises(paged_attn.UnsupportedError, match=r"past_key_values=paged_attn.PagedCache\(model\)"):
        model.generate(**tokenizer("She", return_tensors="pt"), num_beams=4, custom_generate=paged_attn.generate)


@pytest.mark.slow
def test_compile_and_generate_with_beams(demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTN_KV_MEMORY_GIB", "0.05")
    model, tokenizer = copy.deepcopy(demo[0]), demo[1]
    inputs = tokenizer(["She had never", "It was"], return_tensors="pt", padding=True)
    model.compile(backend="paged_attn")
    for settings in ({"num_beams": 3}, {}):
        asked: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, **settings}
        assert model.generate(**inputs, **asked).equal(demo[0].generate(**inputs, **asked))
    assert "generate     of transformers runs on pages" in paged_attn.explain(model)
