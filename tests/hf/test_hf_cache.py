"""`generate` on a PagedCache gives the tokens that it gives on a DynamicCache, in every mode; its pages are shared, copied and freed."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from paged_attn import PagedCache, UnsupportedError
from paged_attn.hf.cache_name import CACHE_NAME
from paged_attn.hf.shared_pages import CacheFull
from tests.tiny_models import build

MODELS = ["llama", "qwen3", "gemma3_text", "gpt2", "mistral"]
SAMPLE = {"do_sample": True, "temperature": 0.9}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {**SAMPLE, "top_k": 20, "top_p": 0.9},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    "beam sampling": {"num_beams": 3, **SAMPLE},
    "several of each": {"num_return_sequences": 3, **SAMPLE},
    "processors": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "bad_words_ids": [[7], [9, 11]]},
    "prefill in chunks": {"prefill_chunk_size": 7},
}
ONE_ROW: dict[str, dict[str, Any]] = {"prompt lookup": {"prompt_lookup_num_tokens": 3}, "assisted": {}, "assisted sampling": SAMPLE}
NEW = 18


def _prompts(padding: tuple[int, ...] = (0, 6), length: int = 19) -> dict[str, Tensor]:
    ids = torch.randint(2, 96, (len(padding), length), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(length) >= torch.tensor(padding)[:, None]
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}


def _poisoned(model: nn.Module, **keywords: Any) -> PagedCache:
    cache = PagedCache(model, page_size=4, num_pages=200, **keywords)
    cache.table.pages.pool.storage.fill_(float("nan"))
    return cache


def _generate(model: Any, cache: Any, prompts: dict[str, Tensor], **keywords: Any) -> Tensor:
    torch.manual_seed(0)
    return model.generate(**prompts, max_new_tokens=NEW, **{CACHE_NAME: cache, **keywords})


def test_a_full_device_is_no_refusal_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    model = build("llama")
    monkeypatch.setattr(type(model.lm_head), "forward", no_room)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        PagedCache(model)


@pytest.mark.parametrize("name", MODELS)
def test_every_mode_gives_the_tokens_of_a_dynamic_cache(name: str) -> None:
    model = build(name)
    wide = {"sliding_window": 256} if name in ("gemma3_text", "mistral") else {}  # in 5.17 assistants cannot leave their windows
    assistant = build(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 2}, **wide)
    assistant.load_state_dict(model.state_dict(), strict=False)
    ONE_ROW["assisted"]["assistant_model"] = assistant
    ONE_ROW["assisted sampling"] = {**SAMPLE, "assistant_model": assistant}
    for modes, prompts in ((MODES, _prompts()), (ONE_ROW, _prompts((0,)))):
        for mode, keywords in modes.items():
            cache = _poisoned(model)
            expected = _generate(model, DynamicCache(config=model.config), prompts, **keywords)
            assert _generate(model, cache, prompts, **keywords).equal(expected), mode
            assert cache.get_seq_length() == prompts["input_ids"].shape[1] + NEW - 1, mode


@pytest.mark.parametrize("name", ["falcon_h1", "jamba", "gemma3n_text", "gpt_neox_japanese", "deepseek_v3"])
def test_hybrids_shared_kv_and_unequal_heads(name: str) -> None:
    from tests.zoo.build import build as build_any

    model, prompts = build_any(name), _prompts((0, 0))
    cache = _poisoned(model)
    for keywords in ({}, {"num_beams": 2}):
        cache.reset()  # a batch of another size may follow
        expected = _generate(model, DynamicCache(config=model.config.get_text_config()), prompts, **keywords)
        assert _generate(model, cache, prompts, **keywords).equal(expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_any_attention_implementation(attention: str) -> None:
    model = build("gemma3_text")
    model.set_attn_implementation(attention)
    expected = _generate(model, DynamicCache(config=model.config), _prompts())
    assert _generate(model, _poisoned(model), _prompts()).equal(expected)


class Recorder(LogitsProcessor, BaseStreamer):
    """Sees each step from inside generate: how many pages are held, and what is streamed."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache, self.held, self.tokens = cache, [], []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.held.append(self.cache.num_pages_held)
        return scores

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append("end")


def test_beams_share_the_pages_of_the_prompt() -> None:
    model, beams, length = build("llama"), 4, 40
    cache = _poisoned(model)
    recorder = Recorder(cache)
    _generate(model, cache, _prompts((0,), length), num_beams=beams, logits_processor=LogitsProcessorList([recorder]))
    prompt = length // 4
    assert recorder.held[0] == beams * prompt  # generate runs the prompt once for each beam
    own = [held - prompt for held in recorder.held[1:]]
    assert max(own) <= beams * -(-NEW // 4)
    assert own[0] == beams  # of the first new token every beam has its own page
    assert len({tuple(pages[:prompt]) for pages in cache.table.row_pages()}) == 1
    assert min(own[4:]) < beams * 2  # and beams of one origin share what they generated, too


def test_rows_of_one_prompt_share_its_pages() -> None:
    model, length = build("llama"), 40
    cache = _poisoned(model)
    _generate(model, cache, _prompts((0, 0), length), num_return_sequences=5, **SAMPLE)
    assert cache.num_pages_held == 2 * length // 4 + 10 * -(-(NEW - 1) // 4)


def test_streamers_get_the_tokens() -> None:
    model = build("llama")
    cache = _poisoned(model)
    recorder = Recorder(cache)
    tokens = _generate(model, cache, _prompts((0,)), streamer=recorder)
    assert recorder.tokens == [*tokens[0].tolist(), "end"]


def test_pages_are_free_again() -> None:
    model = build("llama")
    first = PagedCache(model, page_size=4)
    second = PagedCache(model, shared_with=first)
    for cache in (first, second):
        _generate(model, cache, _prompts())
    assert first.num_pages_used == first.num_pages_held + second.num_pages_held == 36
    del cache, second
    assert first.num_pages_used == first.num_pages_held == 18
    first.reset()
    assert (first.num_pages_used, first.get_seq_length()) == (0, 0)
    gc.disable()  # no cycle keeps them
    try:
        pages = first.table.pages
        _generate(model, first, _prompts())
        del first
        assert pages.num_used == 0
    finally:
        gc.enable()


def test_a_prompt_computed_once_goes_on_in_many_ways() -> None:
    model, prompts = build("gemma3_text"), _prompts((0,), 24)
    prefix = _poisoned(model)
    with torch.no_grad():
        model(prompts["input_ids"][:, :20], **{CACHE_NAME: prefix})
    before = prefix.num_pages_used
    for ending in ([5, 6], [7, 8, 9]):
        ids = torch.cat([prompts["input_ids"][:, :20], torch.tensor([ending])], 1)
        asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        branch = copy.deepcopy(prefix)
        expected = _generate(model, DynamicCache(config=model.config), asked)
        assert _generate(model, branch, asked).equal(expected)
        assert branch.num_pages_used == before + -(-(ids.shape[1] + NEW - 1) // 4) - 5
        del branch
    assert prefix.num_pages_used == before


def test_a_full_pool_says_what_to_do_and_stays_usable() -> None:
    model, prompts = build("llama"), _prompts()
    expected = _generate(model, None, prompts)
    first = PagedCache(model, page_size=4, num_pages=20)
    second = PagedCache(model, shared_with=first)
    with torch.no_grad():
        model(**prompts, **{CACHE_NAME: first})
        with pytest.raises(CacheFull, match=r"needed 10 more KV pages, but only 9 .*more num_pages, or none, so that the pool grows"):
            model(**prompts, **{CACHE_NAME: second})
    first.reset()
    assert _generate(model, second, prompts).equal(expected)


def test_windows_let_go_of_pages_and_crop_knows_it() -> None:
    model, prompts = build("mistral"), _prompts((0,), 64)
    cache = _poisoned(model)
    _generate(model, cache, prompts)
    assert cache.num_pages_held == 3  # 81 tokens, of which 8 are seen
    with pytest.raises(RuntimeError, match=r"tokens before 72 .*activate_past_recording"):
        cache.crop(-3)
    cache.crop(-1)
    assert cache.get_seq_length() == 80
    cache.reset()
    cache.activate_past_recording()
    with torch.no_grad():
        model(**prompts, **{CACHE_NAME: cache})
    cache.crop(-30)
    assert (cache.get_seq_length(), cache.num_pages_held) == (34, 3)


def test_crop_gives_pages_back() -> None:
    model = build("llama")
    cache = _poisoned(model)
    with torch.no_grad():
        model(**_prompts(), **{CACHE_NAME: cache})
    cache.crop(-9)
    assert (cache.get_seq_length(), cache.num_pages_held) == (10, 6)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"crop\(3\): pass a negative number"):
        cache.crop(3)
    cache.crop(-100)
    assert (cache.get_seq_length(), cache.num_pages_held, cache.table.rows) == (0, 0, 0)


def _contrastive(model: Any, cache: Any, prompts: dict[str, Tensor], top: int = 3) -> tuple[list[list[int]], Tensor]:
    """What contrastive search does with its cache: every row tries `top` tokens at once, and one of them is kept."""
    ids, tokens = prompts["input_ids"], []
    logits = model(ids, **{CACHE_NAME: cache}).logits[:, -1]
    for _ in range(8):
        candidates = logits.topk(top).indices
        cache.batch_repeat_interleave(top)
        tried = model(candidates.view(-1, 1), **{CACHE_NAME: cache}).logits[:, -1].view(len(ids), top, -1)
        chosen = tried.amax(-1).argmin(-1)
        cache.batch_select_indices(torch.arange(len(ids)) * top + chosen)
        logits = tried[torch.arange(len(ids)), chosen]
        tokens.append(candidates.gather(1, chosen[:, None]).flatten().tolist())
    keep = torch.tensor([False, True])
    cache.batch_select_indices(keep)
    return tokens, model(ids[keep, :1], **{CACHE_NAME: cache}).logits


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_rows_are_repeated_and_selected(name: str) -> None:
    model, prompts = build(name), _prompts((0, 0))
    with torch.no_grad():
        expected, last = _contrastive(model, DynamicCache(config=model.config), prompts)
        tokens, logits = _contrastive(model, _poisoned(model), prompts)
    assert tokens == expected
    torch.testing.assert_close(logits, last)


def test_what_can_not_be_paged_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    from tests.zoo.build import build as build_any

    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    for model, words in (
        (nn.Linear(2, 2), "needs a transformers PreTrainedModel, got Linear.*paged_attn.LLM"),
        (T5ForConditionalGeneration(T5Config(**small)), "encoder-decoder.*generate without it"),
        (build_any("mamba"), "no layer of MambaForCausalLM keeps K and V"),
        (build_any("deepseek_v32"), "layer 0 of DeepseekV32ForCausalLM keeps its past in a DynamicIndexedLayer"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            PagedCache(model)


def test_misuse_is_named() -> None:
    model, prompts = build("llama"), _prompts()
    cache = PagedCache(model, page_size=4)
    with pytest.raises(ValueError, match="page_size and num_pages are those of the cache in shared_with"):
        PagedCache(model, page_size=4, shared_with=cache)
    with pytest.raises(ValueError, match="other K and V"):
        PagedCache(build("gpt2"), shared_with=cache)
    with pytest.raises(ValueError, match="at least 2"):
        PagedCache(model, num_pages=1)
    with pytest.raises(UnsupportedError, match=r"layer 0: a PagedCache keeps no gradients.*no_grad"):
        model(**prompts, **{CACHE_NAME: cache})
    with torch.no_grad():
        model(**prompts, **{CACHE_NAME: cache})
        with pytest.raises(UnsupportedError, match=r"holds 2 rows, but K and V of 1 rows came"):
            model(prompts["input_ids"][:1], **{CACHE_NAME: cache})
        cache.reset()
        with (
            pytest.raises(UnsupportedError, match=r"layer 0 gave K and V .*bfloat16.*without torch.autocast"),
            torch.autocast("cpu", torch.bfloat16),
        ):
            model(**prompts, **{CACHE_NAME: cache})
    with pytest.raises(NotImplementedError, match="of the PagedCache"):
        cache.layers[0].crop(-1)


def test_what_a_cache_is_made_of_is_checked() -> None:
    model = build("llama")
    with pytest.raises(TypeError, match="shared_with is a DynamicCache; allowed: a PagedCache"):
        PagedCache(model, shared_with=DynamicCache())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"page_size is 1\.5; allowed: an int"):
        PagedCache(model, page_size=1.5)  # type: ignore[arg-type]
