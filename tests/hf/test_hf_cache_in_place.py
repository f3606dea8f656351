"""Inside `patch`, steps of generate attend to the pages in place: the same tokens; what is not provably the same is gathered."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from transformers import DynamicCache

from paged_attn import PagedCache, UnsupportedError, patch
from paged_attn.hf.cache_name import CACHE_NAME
from tests.hf.test_hf_cache import NEW, SAMPLE, _generate, _prompts
from tests.tiny_models import build

MODES = {
    "greedy": ({}, (0, 0)),
    "sampling": (SAMPLE, (0, 0)),
    "beams": ({"num_beams": 3}, (0, 0)),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, (0,)),
    "prefill in chunks": ({"prefill_chunk_size": 7}, (0,)),
}


def _in_place(patched) -> PagedCache:
    cache = PagedCache(patched, page_size=4, num_pages=200)
    cache.table.pages.pool.storage.fill_(float("nan"))
    return cache


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "gpt2", "mistral"])
def test_in_place_gives_the_tokens_of_a_dynamic_cache(name: str) -> None:
    model = build(name)
    expected = {m: _generate(model, DynamicCache(config=model.config), _prompts(rows), **k) for m, (k, rows) in MODES.items()}
    with patch(model) as patched:
        for mode, (keywords, rows) in MODES.items():
            cache = _in_place(patched)
            assert _generate(model, cache, _prompts(rows), **keywords).equal(expected[mode]), mode
            chunks = 2 if mode == "prefill in chunks" else 0
            assert cache.steps_in_place == NEW - 1 + chunks or (mode == "prompt lookup" and 0 < cache.steps_in_place < NEW), mode


def test_calls_that_are_not_provably_the_same_are_gathered() -> None:
    model, padded, plain = build("gemma3_text"), _prompts((0, 6)), _prompts((0, 0))
    dynamic = DynamicCache(config=model.config)
    expected = _generate(model, dynamic, padded)
    with patch(model) as patched:
        cache = _in_place(patched)
        assert _generate(model, cache, padded).equal(expected)
        assert cache.steps_in_place == 0
        cache.reset()
        outputs = _generate(model, cache, plain, output_hidden_states=True, return_dict_in_generate=True)
        assert len(outputs.hidden_states[1]) == 4
        assert cache.steps_in_place == 0
        holes = torch.ones(2, 20, dtype=torch.int64)
        holes[0, 3] = 0
        for changed in (
            {"attention_mask": holes},
            {"attention_mask": holes[:, :1]},
            {"position_ids": torch.tensor([[40], [41]])},
            {"return_dict": False},
            {"token_type_ids": torch.zeros(2, 1)},
        ):
            cache.reset()
            with torch.no_grad():
                model(**plain, **{CACHE_NAME: cache})
                model(input_ids=torch.tensor([[5], [6]]), **{CACHE_NAME: cache}, **changed)
            assert cache.steps_in_place == 0
        with torch.no_grad():
            model(input_ids=torch.tensor([[5], [6]]), **{CACHE_NAME: cache}, attention_mask=None)
        assert cache.steps_in_place == 1
        with pytest.raises(UnsupportedError, match="keeps no gradients"):
            model(input_ids=torch.tensor([[5], [6]]), **{CACHE_NAME: cache})


def test_the_output_and_the_cache_are_as_after_a_gathered_call() -> None:
    model, prompts = build("llama"), _prompts((0,))
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad(), patch(model) as patched:
        caches = [_in_place(patched), PagedCache(model, page_size=4)]
        for keep, rows in ((0, 5), (2, 2)):
            both = []
            for cache in caches:
                cache.reset()
                model(**prompts, **{CACHE_NAME: cache})
                both.append(model(input_ids=ids, **{CACHE_NAME: cache}, logits_to_keep=keep))
                assert both[-1][CACHE_NAME] is cache
            assert both[0].logits.shape == both[1].logits.shape == (1, rows, 96)
            torch.testing.assert_close(both[0].logits, both[1].logits)
            for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
                torch.testing.assert_close(mine.keys, theirs.keys)
                torch.testing.assert_close(mine.values, theirs.values)
        branch = copy.deepcopy(caches[0])
        model(input_ids=ids[:, :1], **{CACHE_NAME: branch})
        assert (branch.get_seq_length(), caches[0].get_seq_length(), branch.steps_in_place) == (25, 24, 3)


def test_the_model_is_restored_and_a_left_patch_refused() -> None:
    model, prompts = build("llama"), _prompts((0, 0))
    expected = _generate(model, None, prompts)
    with patch(model) as patched:
        first, second = _in_place(patched), _in_place(patched)
        assert "forward" in vars(model)
        assert _generate(model, second, prompts).equal(expected)
        assert _generate(model, first, prompts).equal(expected)
    assert "forward" not in vars(model)
    steps = first.steps_in_place
    first.reset()
    assert _generate(model, first, prompts).equal(expected)  # gathered
    assert first.steps_in_place == steps == NEW - 1
    with pytest.raises(UnsupportedError, match=r"not active; make the PagedCache inside `with"):
        PagedCache(patched)


def test_a_cache_of_something_else_than_what_is_attended_is_refused() -> None:
    with patch(build("deepseek_v3")) as patched, pytest.raises(UnsupportedError, match=r"which gathers"):
        PagedCache(patched)


def test_the_example_gives_generates_own_tokens() -> None:
    """It compares with a DynamicCache itself."""
    texts = importlib.import_module("examples.generate_on_pages").main()
    assert set(texts) == {"greedy", "4 beams", "prompt lookup", "she ", "he "}
    assert all(text.startswith("It was a truth") for text in texts.values())
