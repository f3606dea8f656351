"""After `model.compile(backend="paged_attn")` Hugging Face's own generate runs on pages: its tokens, in every mode, with one compile."""

from __future__ import annotations

import copy
import functools
import gc
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache, PreTrainedModel, pipeline

import paged_attn
from paged_attn import PagedCache, UnsupportedError
from paged_attn.attn_ops.kv.page_allocator import PageAllocator
from paged_attn.engine.engine import Engine
from paged_attn.hf.cache_name import CACHE_NAME
from paged_attn.hf.compiled_generate import paged_calls
from paged_attn.hf.compiled_generate.call_rows import Part, steps
from paged_attn.hf.compiled_generate.paged_calls import PagedCalls
from paged_attn.hf.compiled_generate.ragged_cache import RaggedTable
from paged_attn.hf.shared_pages import SharedPages
from tests.capture.tape import TapeRecorder
from tests.engine.models import tokenizer
from tests.hf.test_hf_cache import MODES, NEW, SAMPLE, _prompts
from tests.hf.test_hf_generate import Noting
from tests.recurrent_models import recurrent
from tests.tiny_models import build

SETTINGS = {"NUM_PAGES": "400", "PAGE_SIZE": "4", "MAX_BATCH_TOKENS": "40"}


@pytest.fixture(autouse=True)
def _small_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(f"PAGED_ATTN_{name}", value)
    torch._dynamo.reset()  # it compiles at most eight forms of a module's call
    yield


@functools.cache
def pair(name: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model as it is and compiled, once a process."""
    plain, compiled = build(name, tie_word_embeddings=False), build(name, tie_word_embeddings=False)
    compiled.compile(backend="paged_attn")
    return plain, compiled


def calls_of(model: PreTrainedModel) -> PagedCalls:
    calls = model._compiled_call_impl
    assert isinstance(calls, PagedCalls)
    return calls


def generate(model: Any, given: dict[str, Any], **keywords: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(**given, **{"max_new_tokens": NEW, **keywords})


def steps_of(model: PreTrainedModel) -> int:
    calls = model._compiled_call_impl
    return calls.num_steps if isinstance(calls, PagedCalls) else 0


def assert_same_on_pages(models: tuple[Any, Any], given: dict[str, Any], **keywords: Any) -> None:
    expected, before = generate(models[0], given, **keywords), steps_of(models[1])
    assert generate(models[1], given, **keywords).equal(expected), keywords
    assert steps_of(models[1]) > before


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3", "gemma3_text", "gpt2", "mistral", "deepseek_v3"))]
)
def test_every_mode_gives_generates_own_tokens(name: str) -> None:
    models = pair(name)
    for keywords in MODES.values():
        assert_same_on_pages(models, _prompts(), **keywords)
    wide = {"sliding_window": 256} if name in ("gemma3_text", "mistral") else {}  # in 5.17 assistants cannot leave their windows
    assistant = build(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 2}, **wide)
    for more in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}, {**SAMPLE, "assistant_model": assistant}):
        assert_same_on_pages(models, _prompts((0,)), **more)
    gc.collect()
    calls = calls_of(models[1])
    assert calls._pages is not None and calls._pages.num_used == 0


def test_one_compile_serves_all_lengths_and_batches() -> None:
    models = pair()
    assert_same_on_pages(models, _prompts())
    before = dict(counters["stats"])
    for paddings, length in (((0,), 3), ((0, 0, 5), 90), ((1, 2, 3, 4, 5), 33), ((0,), 180)):
        assert_same_on_pages(models, _prompts(paddings, length))
    assert dict(counters["stats"]) == before


@pytest.mark.slow
def test_the_first_call_of_all_is_on_pages_but_for_its_prompt() -> None:
    models = build("llama", tie_word_embeddings=False), build("llama", tie_word_embeddings=False)
    models[1].compile(backend="paged_attn")
    assert_same_on_pages(models, _prompts())
    assert steps_of(models[1]) == 1 + NEW - 1  # the prompts again, and each later token
    again = copy.deepcopy(models[1])
    assert again._compiled_call_impl is None and generate(again, _prompts()).equal(generate(models[0], _prompts()))


@pytest.mark.parametrize("changed", ["reordered", "assisted"])
def test_the_first_call_of_all_begins_anew_only_where_its_own_generate_goes_on(changed: str) -> None:
    plain, compiled = build("llama"), build("llama")
    compiled.compile(backend="paged_attn")
    given = _prompts((0,) * (3 if changed == "reordered" else 1))
    if changed == "assisted":  # takes back what it guessed between two calls
        assert generate(compiled, given, prompt_lookup_num_tokens=3).equal(generate(plain, given, prompt_lookup_num_tokens=3))
        return
    answers = []
    for model in (plain, compiled):
        first = generate(model, given, max_new_tokens=1, return_dict_in_generate=True)
        order = torch.tensor([1, 2, 0])
        first[CACHE_NAME].reorder_cache(order)
        more = torch.cat([first.sequences[order], torch.tensor([[7], [8], [9]])], 1)
        answers.append(generate(model, {"input_ids": more, "attention_mask": torch.ones_like(more), CACHE_NAME: first[CACHE_NAME]}))
    assert answers[1].equal(answers[0])


@pytest.mark.parametrize("change", ["reorder_cache", "batch_repeat_interleave", "batch_select_indices"])
def test_the_first_call_of_all_in_a_loop_of_ones_own_goes_on_with_its_rows(change: str) -> None:
    """Which it may have put in another order, repeated or left out, while the number of tokens stayed."""
    values, rows = {
        "reorder_cache": (torch.tensor([1, 0]), [1, 0]), "batch_repeat_interleave": (2, [0, 0, 1, 1]),
        "batch_select_indices": (torch.tensor([1]), [1]),
    }[change]  # fmt: skip

    def loop(model: Any, input_ids: Tensor, *_: Any, **given: Any) -> Tensor:
        cache, ids, new = given[CACHE_NAME], input_ids, input_ids
        for index in range(5):
            output = model(input_ids=new, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
            cache, new = output[CACHE_NAME], output.logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], 1)
            if not index:
                getattr(cache, change)(values)
                ids, new = ids[rows], new[rows]
        return ids

    plain, compiled = build("llama"), build("llama")
    compiled.compile(backend="paged_attn")
    given = _prompts((0, 0))
    assert generate(compiled, given, custom_generate=loop).equal(generate(plain, given, custom_generate=loop))


def test_a_call_with_ids_that_are_no_tokens_runs_as_written() -> None:
    """On pages a negative id would stand for a token of the step before."""
    plain, compiled = pair()
    generate(compiled, _prompts())
    given = _prompts((0, 0, 0))
    given["input_ids"][1, 4] = -1
    for model in (plain, compiled):
        with pytest.raises(IndexError, match="out of range"):
            generate(model, given)


def test_numbers_of_a_checkpoint_that_no_engine_has_room_for_are_transformers_own(caplog: pytest.LogCaptureFixture) -> None:
    plain, compiled = build("llama"), build("llama")
    compiled.compile(backend="paged_attn")
    for model in (plain, compiled):
        model.generation_config.min_new_tokens, model.generation_config.num_beams = 200, 2
    assert_same_on_pages((plain, compiled), _prompts(), min_new_tokens=0)
    assert "num_beams" not in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("traced_anew")
def test_a_second_model_of_the_same_class_finds_its_own_pages() -> None:
    """Dynamo runs the first one's graph for it, and asks no backend."""
    found = []
    for seed in (1, 2):
        models = build("llama", seed=seed, tie_word_embeddings=False), build("llama", seed=seed, tie_word_embeddings=False)
        models[1].compile(backend="paged_attn")
        before = counters["stats"]["unique_graphs"]
        assert_same_on_pages(models, _prompts())
        found.append((calls_of(models[1]), counters["stats"]["unique_graphs"] - before))
    assert found[0][0] is not found[1][0] and [graphs for _, graphs in found] == [2, 1]


def test_a_prompt_of_several_beams_is_computed_once() -> None:
    models = pair()
    generate(models[1], _prompts((0,)))
    rows: list[int] = []
    calls = calls_of(models[1])
    engine = calls.engine
    assert engine is not None
    own = engine.run_rows
    engine.run_rows = lambda columns: rows.append(len(columns)) or own(columns)  # type: ignore[method-assign, func-returns-value]
    try:
        assert_same_on_pages(models, _prompts((0,)), num_beams=4)
    finally:
        del engine.run_rows
    assert rows[0] == 1 and set(rows[1:]) == {4}


def test_streams_scores_and_the_output() -> None:
    models, given = pair(), _prompts()
    streams = [Noting(), Noting()]
    more: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    theirs, ours = (generate(model, given, streamer=stream, **more) for model, stream in zip(models, streams, strict=True))
    assert ours.sequences.equal(theirs.sequences)
    assert [v.tolist() for v in streams[0].put_there] == [v.tolist() for v in streams[1].put_there]
    torch.testing.assert_close(ours.logits, theirs.logits, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(ours.scores, theirs.scores, atol=2e-5, rtol=1e-4)
    cache = ours[CACHE_NAME]
    length = given["input_ids"].shape[1] + NEW - 1
    assert cache.get_seq_length() == theirs[CACHE_NAME].get_seq_length() == length
    mask = torch.cat([given["attention_mask"], torch.ones(2, NEW, dtype=torch.int64)], 1)
    on, branch = {"input_ids": ours.sequences, "attention_mask": mask}, copy.deepcopy(cache)
    expected = generate(models[0], on, **{CACHE_NAME: theirs[CACHE_NAME]})
    assert generate(models[1], on, **{CACHE_NAME: cache}).equal(expected)
    assert generate(models[1], on, **{CACHE_NAME: branch}).equal(expected)


def test_what_users_keep_themselves_runs_as_written(caplog: pytest.LogCaptureFixture) -> None:
    models, given = pair(), _prompts((0,))
    generate(models[1], given)
    before = steps_of(models[1])
    for cache in (DynamicCache(config=models[1].config), PagedCache(models[0])):
        assert generate(models[1], given, **{CACHE_NAME: cache}, max_new_tokens=3).equal(generate(models[0], given, max_new_tokens=3))
    own = DynamicCache(config=models[1].config)
    with torch.no_grad():
        models[1](**given, **{CACHE_NAME: own})
    assert own.get_seq_length() == 19
    outputs = generate(models[1], given, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    assert len(outputs.hidden_states[0]) == 4
    assert steps_of(models[1]) == before
    assert "a call of generate runs without pages: it has output_hidden_states" in caplog.text


def test_modes_threads_and_pipelines() -> None:
    models, spelled, found = pair(), copy.deepcopy(tokenizer()), dict[int, bool]()
    with torch.inference_mode():
        assert_same_on_pages(models, _prompts(), num_beams=2)
    expected = models[0].generate(**_prompts(), max_new_tokens=6, do_sample=False)

    def run(number: int) -> None:
        found[number] = models[1].generate(**_prompts(), max_new_tokens=6, do_sample=False).equal(expected)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), True)
    spelled.padding_side, before = "left", steps_of(models[1])
    asked: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "batch_size": 2}
    theirs, ours = (pipeline("text-generation", model=model, tokenizer=spelled)(["ab", "cdef"], **asked) for model in models)
    assert ours == theirs and steps_of(models[1]) == before + 5
    with torch.autocast("cpu", torch.bfloat16):
        assert models[1].generate(**_prompts(), max_new_tokens=2).shape == (2, 21)
    assert steps_of(models[1]) == before + 5


def test_a_cache_of_pages_is_refused_where_it_can_not_be_followed() -> None:
    plain, compiled = pair()
    cache = generate(compiled, _prompts((0,)), return_dict_in_generate=True, max_new_tokens=3)[CACHE_NAME]
    token = torch.tensor([[5]])
    with torch.no_grad():
        with pytest.raises(UnsupportedError, match="the model was called uncompiled"):
            plain(input_ids=token, **{CACHE_NAME: cache})
        with pytest.raises(UnsupportedError, match="cannot run on pages: it has output_attentions"):
            compiled(input_ids=token, **{CACHE_NAME: cache}, output_attentions=True)
        with pytest.raises(UnsupportedError, match="its position_ids do not count each row's tokens from 0 on"):
            compiled(input_ids=token, **{CACHE_NAME: cache}, position_ids=torch.tensor([[3]]))
        with pytest.raises(UnsupportedError, match="cannot run on pages: it has use_cache=False"):
            compiled(input_ids=token, **{CACHE_NAME: cache}, use_cache=False)
        with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
            compiled(token, input_ids=token, **{CACHE_NAME: cache})
        with torch.enable_grad(), pytest.raises(UnsupportedError, match=r"gradients are on \(torch.no_grad\(\) turns them off\)"):
            compiled(input_ids=token, **{CACHE_NAME: cache})
        with pytest.raises(UnsupportedError, match="it has 2 rows, and the cache 1"):
            compiled(input_ids=token.expand(2, 1), **{CACHE_NAME: cache})
        with pytest.raises(UnsupportedError, match="has 256 positions; generate fewer"):
            compiled(input_ids=token.expand(1, 250), **{CACHE_NAME: cache})
        named = compiled(input_ids=token, **{CACHE_NAME: copy.deepcopy(cache)}).logits
        logits = compiled(token, **{CACHE_NAME: cache}).logits
    assert logits.equal(named) and logits.shape == (1, 1, 96) and cache.get_seq_length() == 22
    with pytest.raises(UnsupportedError, match=r"more KV pages of 4 tokens are needed, and \d+ of 400 are free"):
        generate(compiled, _prompts((0,) * 30, 200), do_sample=True, num_return_sequences=3)


@pytest.mark.slow
def test_a_model_that_changes_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    models = build("llama", tie_word_embeddings=False), build("llama", tie_word_embeddings=False)
    models[1].compile(backend="paged_attn")
    assert_same_on_pages(models, _prompts())
    engine = calls_of(models[1]).engine
    for model in models:
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    assert_same_on_pages(models, _prompts())
    assert calls_of(models[1]).engine is engine
    head = torch.nn.Linear(32, 96, bias=False)
    for model in models:
        model.lm_head = head
    assert_same_on_pages(models, _prompts())
    assert calls_of(models[1]).engine is not engine
    assert "the module lm_head was replaced; generate() makes a new engine" in caplog.text
    assert "make a new LLM" not in caplog.text  # there is none


@pytest.mark.slow
def test_explain_tells_what_generate_runs_on(caplog: pytest.LogCaptureFixture) -> None:
    generate(pair()[1], _prompts())
    text = paged_attn.explain(pair()[1])
    assert "3 attention layers rewritten" in text and "not paged" not in text
    assert "generate     of transformers runs on pages, " in text
    model = copy.deepcopy(recurrent("falcon_h1"))
    expected = generate(model, _prompts((0,)), max_new_tokens=3)
    model.compile(backend="paged_attn")
    assert generate(model, _prompts((0,)), max_new_tokens=3).equal(expected)
    assert "FalconH1ForCausalLM has recurrent state" in calls_of(model).refusal.why
    assert "FalconH1ForCausalLM: generate runs without pages" in caplog.text


@pytest.mark.slow
def test_captured_steps_serve_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TapeRecorder()
    monkeypatch.setattr(paged_calls, "Engine", partial(Engine, recorder=recorder))
    monkeypatch.setenv("PAGED_ATTN_MAX_REQUESTS", "8")
    monkeypatch.setenv("PAGED_ATTN_GRAPHS", "full")
    models = build("llama", tie_word_embeddings=False), build("llama", tie_word_embeddings=False)
    models[1].compile(backend="paged_attn")
    generate(models[1], _prompts(), max_new_tokens=2)
    engine = calls_of(models[1]).engine
    assert engine is not None and engine.step_runner.graphs is not None
    uncaptured: list[Any] = []
    monkeypatch.setattr(engine.step_runner, "_uncaptured", uncaptured.append)
    for keywords in ({}, {"num_beams": 3}):
        assert_same_on_pages(models, _prompts(), **keywords)
    assert not uncaptured


@pytest.mark.slow
def test_an_optimized_module_is_served_as_the_model_inside() -> None:
    from paged_attn import LLM, SamplingParams

    model = build("llama", tie_word_embeddings=False)
    expected = model.generate(torch.tensor([[4, 5, 6]]), max_new_tokens=5, do_sample=False)[0, 3:].tolist()
    before = dict(counters["stats"])
    for compiled in (torch.compile(model, backend="paged_attn"), model):
        if compiled is model:
            model.compile(backend="paged_attn")
        llm = LLM(compiled)
        assert llm.engine.runner.model is model
        assert llm.generate([[4, 5, 6]], SamplingParams(max_new_tokens=5))[0].token_ids == expected
    assert counters["stats"]["unique_graphs"] <= before.get("unique_graphs", 0) + 2  # one trace for each engine, and no other


def test_rows_are_cut_into_steps() -> None:
    assert list(steps([3, 2], 1, 10, 4)) == [[Part(0, 0, 3, 1), Part(1, 0, 2, 1)]]
    assert list(steps([7, 2], 2, 4, 4)) == [[Part(0, 0, 4, 0)], [Part(0, 4, 7, 2), Part(1, 0, 1, 1)], [Part(1, 1, 2, 1)]]
    assert [[p.row for p in step] for step in steps([1] * 5, 1, 10, 2)] == [[0, 1], [2, 3], [4]]
    assert sum(p.num_logits for step in steps([9, 8], 5, 3, 2) for p in step) == 10


def test_pages_of_unequal_rows_are_shared_until_one_writes() -> None:
    from paged_attn import KVPool

    shared = SharedPages(KVPool(pair_specs(), 32, 4, torch.float32))
    table = RaggedTable(shared, 2)
    table.extend(np.array([6, 3]))
    assert table.num_pages.tolist() == [2, 1] and shared.num_used == 3
    table.select(np.array([0, 0, 1]))
    other = table.copied()
    assert shared.num_used == 3
    table.extend(np.array([1, 1, 1]))  # rows 0 and 1 share a half full page with `other`, row 2 its only one
    assert shared.num_used == 6 and len({*table.pages[:, 1].tolist()}) == 3
    assert table.pages[0, 0] == table.pages[1, 0] == other.pages[0, 0]
    table.truncate(np.array([4, 9, 0]))
    assert table.lengths.tolist() == [4, 7, 0] and table.num_pages.tolist() == [1, 2, 0]
    for each in (other, table):
        each.truncate(np.zeros_like(each.lengths))
    assert shared.num_used == 0


@pytest.mark.parametrize("way", ["extend", "select"])
def test_an_interrupt_loses_no_page_of_unequal_rows(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Ctrl-C when pages were handed out or taken back, and the table does not know yet: it is raised when it does."""
    from paged_attn import KVPool

    shared = SharedPages(KVPool(pair_specs(), 32, 4, torch.float32))
    table = RaggedTable(shared, 2)
    table.extend(np.array([6, 3]))
    name = "allocate" if way == "extend" else "free"
    function, calls = getattr(PageAllocator, name), iter(range(9))

    def interrupting(*args: Any) -> Any:
        result = function(*args)
        if next(calls) == 0:
            signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(PageAllocator, name, interrupting)
        with pytest.raises(KeyboardInterrupt):
            table.extend(np.array([9, 9])) if way == "extend" else table.select(np.array([1]))
    assert shared.num_used == len({*table.pages[table.pages > 0].tolist()})
    table.truncate(np.zeros_like(table.lengths))
    assert shared.num_used == 0


def pair_specs() -> Any:
    from paged_attn import AttentionSpec

    return [AttentionSpec(2, 2, 8, 8, scale=1.0, kv_layer=0)]
