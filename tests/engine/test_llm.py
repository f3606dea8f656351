"""`LLM.generate` says what the model's own `generate` says, however the work is cut up; and every sampling setting works through it."""

from __future__ import annotations

import threading

import pytest
import torch

from paged_attn import LLM, SamplingParams
from tests.covering import every_pair
from tests.engine.models import assert_nothing_left, make_llm, oracle, random_prompts, tiny, tokenizer
from tests.tiny_models import VOCAB, build

PROMPTS = random_prompts(0, 1, 3, 17, 30, 9, 17)
GREEDY = SamplingParams(max_new_tokens=12)


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    ("name", "max_batch_tokens", "page_size", "prefix_cache"),
    every_pair(["qwen3", "gemma3_text"], [1, 3, 16, 2048], [1, 4, 16], [True, False]),
)
def test_it_equals_the_models_own_generate(name: str, max_batch_tokens: int, page_size: int, prefix_cache: bool) -> None:
    model = tiny(name)
    llm = make_llm(model, max_batch_tokens=max_batch_tokens, page_size=page_size, prefix_cache=prefix_cache, num_pages=400)
    expected = [oracle(p, 12, model) for p in PROMPTS]
    assert tokens(llm, PROMPTS) == expected
    assert llm.engine.stats.cached_tokens == 0
    assert tokens(llm, PROMPTS[::-1]) == expected[::-1], "over a warm cache, in another order"
    assert (llm.engine.stats.cached_tokens > 0) == prefix_cache
    assert_nothing_left(llm)
    assert tokens(llm, PROMPTS[2:4]) == expected[2:4], "after close"


def test_text_that_is_read_at_the_end_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [tokenizer().decode(oracle(p, 12), skip_special_tokens=True) for p in PROMPTS]
    calls: list[int] = []
    kind = type(tokenizer())
    decode = kind.decode
    monkeypatch.setattr(kind, "decode", lambda self, ids, **settings: calls.append(len(ids)) or decode(self, ids, **settings))
    llm = make_llm(tokenizer=tokenizer())  # after the patch: `direct_decoder` passes by a `decode` that is transformers' own
    assert [c.text for c in llm.generate(PROMPTS, GREEDY)] == whole
    assert calls == [12] * len(PROMPTS)
    assert "".join(event.text for event in llm.stream(PROMPTS[3], GREEDY)) == whole[3]
    stopped = llm.generate(PROMPTS[3], SamplingParams(max_new_tokens=12, stop=(whole[3][4:6],)))[0]
    assert stopped.text == whole[3][: whole[3].index(whole[3][4:6])] and stopped.finish_reason == "stop"
    cancelled = llm.engine.add_request(PROMPTS[3], GREEDY, text_at_end=True)
    while cancelled.num_sampled < 5:
        llm.engine.step()
    llm.engine.cancel(cancelled.id)
    assert cancelled.detokenizer.text == tokenizer().decode(oracle(PROMPTS[3], 12)[: cancelled.num_sampled], skip_special_tokens=True)
    assert_nothing_left(llm)


@pytest.mark.parametrize("max_requests", [1, 2, 5])
def test_fewer_places_than_prompts(max_requests: int) -> None:
    llm = make_llm(max_requests=max_requests, max_batch_tokens=16)
    prompts = random_prompts(1, *[3 + n % 11 for n in range(13)])
    assert tokens(llm, prompts) == [oracle(p) for p in prompts]
    assert_nothing_left(llm)


def test_a_request_says_the_same_alone_and_in_a_batch() -> None:
    llm = make_llm(prefix_cache=False)
    params = [
        SamplingParams(max_new_tokens=12, temperature=t, seed=i, top_p=0.9, repetition_penalty=1.1)
        for i, t in enumerate([0, 0.7, 1, 1.5, 0, 2])
    ]
    together = [c.token_ids for c in llm.generate(PROMPTS, params)]
    alone = [llm.generate(prompt, each)[0].token_ids for prompt, each in zip(PROMPTS, params, strict=True)]
    assert together == alone
    assert all(got != oracle(p) for got, p, each in zip(together, PROMPTS, params, strict=True) if each.temperature)


def test_results_are_in_the_order_of_the_prompts_and_tell_theirs() -> None:
    llm = make_llm(max_requests=3)
    lengths = [12, 1, 7, 3, 0, 5]
    results = llm.generate(PROMPTS, [SamplingParams(max_new_tokens=n) for n in lengths])
    assert [r.prompt_token_ids for r in results] == PROMPTS
    assert [r.token_ids for r in results] == [oracle(p, 12)[:n] for p, n in zip(PROMPTS, lengths, strict=True)]
    assert [(r.finish_reason, r.stop_reason, r.prompt, r.text, r.logprobs) for r in results] == [("length", None, None, "", None)] * 6
    assert len({r.request_id for r in results}) == 6


def test_texts_and_ids_may_be_mixed() -> None:
    llm = make_llm(tokenizer=tokenizer())
    texts = ["The quick brown", " ~", "fox"]
    ids = [tokenizer()(text).input_ids for text in texts]
    results = llm.generate([texts[0], ids[1], texts[2]], GREEDY)
    assert [r.prompt_token_ids for r in results] == ids
    assert [r.prompt for r in results] == [texts[0], None, texts[2]]
    assert [r.token_ids for r in results] == [oracle(each) for each in ids]
    assert [r.text for r in results] == [tokenizer().decode(oracle(each), skip_special_tokens=True) for each in ids]


@pytest.mark.parametrize("form", ["text", "ids", "tuple", "tensor", "rows"])
def test_one_prompt_alone_and_tensors_are_taken(form: str) -> None:
    ids = tokenizer()("one prompt").input_ids
    given = {"text": "one prompt", "ids": ids, "tuple": tuple(ids), "tensor": torch.tensor(ids), "rows": torch.tensor([ids])}[form]
    (got,) = make_llm(tokenizer=tokenizer()).generate(given, GREEDY)
    assert got.token_ids == oracle(ids)


def test_no_prompts_give_no_results() -> None:
    llm = make_llm()
    assert llm.generate([]) == [] and list(llm.stream([])) == []
    assert_nothing_left(llm)


def test_no_new_tokens_wanted() -> None:
    llm = make_llm(tokenizer=tokenizer(), max_requests=1)
    results = llm.generate(PROMPTS[:3], SamplingParams(max_new_tokens=0))
    assert [(r.token_ids, r.text, r.finish_reason) for r in results] == [([], "", "length")] * 3
    assert llm.engine.stats.steps == 0, "nothing is computed for them"
    assert_nothing_left(llm)


def test_stop_tokens_end_a_request_and_are_part_of_it() -> None:
    llm = make_llm()
    said = [oracle(p) for p in PROMPTS]
    stops = [each[4] for each in said]
    results = llm.generate(PROMPTS, [SamplingParams(max_new_tokens=12, stop_token_ids=(0, stop)) for stop in stops])
    for result, own, stop in zip(results, said, stops, strict=True):
        assert result.token_ids == own[: own.index(stop) + 1]
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert_nothing_left(llm)


def test_the_models_end_token_ends_a_request_unless_it_is_ignored() -> None:
    model = tiny()
    end = oracle(PROMPTS[2])[3]
    model.generation_config.eos_token_id = [0, end]
    try:
        llm = make_llm(model)
        expected = oracle(PROMPTS[2], 12, eos_token_id=end, pad_token_id=0)
        (stopped,) = llm.generate(PROMPTS[2], GREEDY)
        (ignored,) = llm.generate(PROMPTS[2], SamplingParams(max_new_tokens=12, ignore_eos=True))
        (both,) = llm.generate(PROMPTS[2], SamplingParams(max_new_tokens=12, ignore_eos=True, stop_token_ids=(end,)))
    finally:
        model.generation_config.eos_token_id = None
    assert stopped.token_ids == both.token_ids == expected == oracle(PROMPTS[2])[: len(expected)] and len(expected) <= 4
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None), "as in vLLM: nobody asked for this end"
    assert (both.finish_reason, both.stop_reason) == ("stop", end)
    assert (ignored.token_ids, ignored.finish_reason) == (oracle(PROMPTS[2]), "length")


@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_strings_cut_the_text_before_them(length: int) -> None:
    llm = make_llm(tokenizer=tokenizer())
    texts = [tokenizer().decode(oracle(p, 20)) for p in PROMPTS]
    stops = [text[6 : 6 + length] for text in texts]
    results = llm.generate(PROMPTS, [SamplingParams(max_new_tokens=20, stop=("never said", stop)) for stop in stops])
    for result, text, stop in zip(results, texts, stops, strict=True):
        at = text.index(stop)
        assert (result.text, result.finish_reason, result.stop_reason) == (text[:at], "stop", stop)
        assert len(result.token_ids) == at + length, "a token is a character here"
    assert_nothing_left(llm)


def test_a_stop_string_at_the_last_token_counts_as_stop() -> None:
    llm = make_llm(tokenizer=tokenizer())
    text = tokenizer().decode(oracle(PROMPTS[0], 8))
    (got,) = llm.generate(PROMPTS[0], SamplingParams(max_new_tokens=8, stop=text[-3:]))
    assert (got.text, got.finish_reason) == (text[: text.index(text[-3:])], "stop")
    (held,) = llm.generate(PROMPTS[0], SamplingParams(max_new_tokens=8, stop=text[-3:] + "~"))
    assert (held.text, held.finish_reason, held.stop_reason) == (text, "length", None), "what was held back comes at the end"


def test_logprobs_are_the_models_own() -> None:
    llm = make_llm(max_batch_tokens=7)
    prompt = PROMPTS[2]
    three, none, own = llm.generate([prompt] * 3, [SamplingParams(max_new_tokens=5, logprobs=k) for k in (3, None, 0)])
    assert none.logprobs is None and three.logprobs is not None and own.logprobs is not None
    ids = [*prompt, *oracle(prompt, 5)]
    with torch.no_grad():
        expected = tiny()(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert len(three.logprobs) == len(own.logprobs) == 5
    for row, best, sampled, token in zip(expected, three.logprobs, own.logprobs, three.token_ids, strict=True):
        assert list(best) == row.topk(3).indices.tolist() and list(sampled) == [token]
        assert best == pytest.approx({i: row[i].item() for i in best}, abs=1e-4)
        assert sampled[token] == pytest.approx(best[token], abs=1e-5)


@pytest.mark.parametrize("penalty", [0.7, 1.3, 3.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    llm = make_llm(max_batch_tokens=16, num_pages=400)
    params = SamplingParams(max_new_tokens=20, repetition_penalty=penalty)
    expected = [oracle(p, 20, repetition_penalty=penalty) for p in PROMPTS]
    assert tokens(llm, PROMPTS, params) == expected != [oracle(p, 20) for p in PROMPTS]


def test_a_seed_repeats_itself_and_no_seed_does_not() -> None:
    llm = make_llm()
    seeded, free = SamplingParams(max_new_tokens=12, temperature=1.5, seed=5), SamplingParams(max_new_tokens=12, temperature=1.5)
    assert tokens(llm, PROMPTS, seeded) == tokens(llm, PROMPTS, seeded)
    assert tokens(llm, PROMPTS, free) != tokens(llm, PROMPTS, free)


def test_a_directory_is_loaded_with_its_dtype(tmp_path) -> None:
    build("qwen3").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    llm = LLM(tmp_path, page_size=4, num_pages=40, dtype=torch.float32)
    (got,) = llm.generate("hello", GREEDY)
    ids = tokenizer()("hello").input_ids
    assert got.prompt_token_ids == ids and got.token_ids == oracle(ids, 12, build("qwen3"))
    assert got.text == tokenizer().decode(got.token_ids)
    assert LLM(str(tmp_path), num_pages=9, dtype=torch.bfloat16, self_check=False).engine.pool.dtype is torch.bfloat16


def test_two_threads_generate_at_once() -> None:
    llm = make_llm(max_requests=4, max_batch_tokens=16, tokenizer=tokenizer())
    results: dict[int, list[list[list[int]]]] = {}
    groups = [random_prompts(20 + i, 5, 21, 2, 13) for i in range(3)]

    def work(index: int) -> None:
        results[index] = [tokens(llm, groups[index]) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert results == {i: [[oracle(p) for p in group]] * 3 for i, group in enumerate(groups)}
    assert_nothing_left(llm)


def test_the_defaults_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_ATTN_KV_MEMORY_GIB", "0.01")
    with LLM(build("qwen3", num_hidden_layers=1)) as llm:
        (got,) = llm.generate([5, 6, 7])
    assert len(got.token_ids) == 128 and max(got.token_ids) < VOCAB
    assert llm.engine.kv.num_usable == 0.01 * 2**30 // (16 * 2 * 2 * 8 * 4) - 1
    assert_nothing_left(llm)
