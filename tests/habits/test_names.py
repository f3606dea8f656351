"""`min_tokens`, `bad_words`, `n`, stop strings that stay, special tokens: what vLLM and transformers mean by them, against `generate`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from paged_attn import LLM, SamplingParams
from tests.engine.models import OVERLAP, assert_nothing_left, make_llm, oracle, random_prompts, tiny, tokenizer
from tests.server.serving import Running, chat_tokenizer, serving

PROMPTS = random_prompts(5, 3, 9, 17, 30)
NEW = 14
BOTH = pytest.mark.parametrize("overlap", [False, True])


def generated(prompt: list[int], **settings: Any) -> list[int]:
    """The new tokens of the model's own greedy `generate`, whose settings may be lists."""
    out = tiny().generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW, do_sample=False, **settings
    )
    return list(out[0, len(prompt) :].tolist())


def tokens(llm: LLM, params: Any) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPTS, params)]


@BOTH
def test_min_tokens_is_that_of_generate(overlap: bool) -> None:
    ends = [oracle(prompt, NEW)[2] for prompt in PROMPTS]  # each would end after its third token, or before
    llm = make_llm(overlap=overlap)
    params = [SamplingParams(max_tokens=NEW, min_tokens=5 + i, stop_token_ids=[end]) for i, end in enumerate(ends)]
    expected = [oracle(p, NEW, min_new_tokens=5 + i, eos_token_id=end) for i, (p, end) in enumerate(zip(PROMPTS, ends, strict=True))]
    assert tokens(llm, params) == expected and all(len(row) > 5 + i or row[-1] == ends[i] for i, row in enumerate(expected))
    assert_nothing_left(llm)


@BOTH
def test_bad_words_are_those_of_generate(overlap: bool) -> None:
    """Sequences of one, two and three tokens, each of which would come, and one that begins in the prompt."""
    llm = make_llm(overlap=overlap, max_batch_tokens=16)  # prompts in chunks, mixed with decodes
    found: list[list[tuple[int, ...]]] = []
    for prompt in PROMPTS:
        bad: list[tuple[int, ...]] = []
        for length in (3, 2, 2, 1, 2, 3, 2, 2, 1):  # what now comes is forbidden, too
            new = generated(prompt, **({"bad_words_ids": [list(word) for word in bad]} if bad else {}))
            at = len(bad) % (NEW - 3)
            bad.append(tuple([*prompt, *new][len(prompt) - 1 :][:length] if len(bad) == 4 else new[at : at + length]))
        found.append(bad)
    expected = [generated(p, bad_words_ids=[list(word) for word in bad]) for p, bad in zip(PROMPTS, found, strict=True)]
    assert tokens(llm, [SamplingParams(max_tokens=NEW, bad_words=bad) for bad in found]) == expected
    assert expected != [oracle(prompt, NEW) for prompt in PROMPTS]
    assert_nothing_left(llm)


@BOTH
def test_bad_words_never_come_when_tokens_are_drawn(overlap: bool) -> None:
    llm = make_llm(overlap=overlap)
    pairs = [(a, b) for a in range(1, 48) for b in range(48, 96)]  # nothing of the upper half after something of the lower one
    params = [SamplingParams(max_tokens=20, temperature=2.0, seed=i, bad_words=[*pairs, (95,)], min_tokens=3) for i in range(4)]
    for prompt, row in zip(PROMPTS, tokens(llm, params), strict=True):
        assert 95 not in row and not any(a < 48 <= b for a, b in pairwise([prompt[-1], *row]) if a)
    assert any(max(row) >= 48 for row in tokens(llm, params)) or any(max(prompt) >= 48 for prompt in PROMPTS)


def test_bad_words_as_texts() -> None:
    llm = make_llm(tokenizer=tokenizer())
    word = tokenizer().decode(oracle(PROMPTS[0], NEW)[3:5])
    completion = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=NEW, bad_words=[word]))[0]
    assert word in tokenizer().decode(oracle(PROMPTS[0], NEW)) and word not in completion.text
    with pytest.raises(ValueError, match="bad_words: got a text, and there is no tokenizer"):
        make_llm().generate([[4]], SamplingParams(bad_words=["x"]))
    with pytest.raises(TypeError, match=r"bad_words: got 'x'; allowed: texts, or lists of token ids, in a tuple or list; write \(text,\)"):
        SamplingParams(bad_words="x")


@BOTH
def test_a_step_that_failed_is_done_again(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(overlap=overlap)
    params = SamplingParams(max_tokens=NEW, bad_words=[oracle(PROMPTS[1], NEW)[3:5], oracle(PROMPTS[1], NEW)[7:10]])
    expected = generated(PROMPTS[1], bad_words_ids=[list(word) for word in params.bad_words])
    run, calls = llm.engine.step_runner.run, iter(range(100))

    def failing(*args: Any) -> Any:
        if next(calls) in (4, 7, 8):
            raise RuntimeError("planned")
        return run(*args)

    monkeypatch.setattr(llm.engine.step_runner, "run", failing)
    request = llm.engine.add_request(PROMPTS[1], params)
    while llm.engine.has_work:
        try:
            llm.engine.step()
        except RuntimeError as error:
            assert str(error) == "planned"
    assert request.output_token_ids == expected


def test_n_answers_share_the_prompt() -> None:
    llm = make_llm(tokenizer=tokenizer(), overlap=OVERLAP, prefix_wait_tokens=4)
    params = [SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=7), SamplingParams(max_tokens=6)]
    done = llm.generate([PROMPTS[3], PROMPTS[1]], params)
    assert [(each.index, each.answer) for each in done] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    alone = [SamplingParams(max_tokens=6, temperature=1.0, seed=seed) for seed in (7, 8, 9)]
    fresh = make_llm().generate([PROMPTS[3]] * 3, alone)
    assert [each.token_ids for each in done] == [*(each.token_ids for each in fresh), oracle(PROMPTS[1], 6)]
    assert len({tuple(each.token_ids) for each in done[:3]}) > 1
    assert [each.cached_tokens for each in done[:3]] == [0, 28, 28], "all of the prompt's whole pages"
    texts: dict[tuple[int, int], str] = {}
    for event in llm.stream([PROMPTS[3], PROMPTS[1]], params):
        texts[event.index, event.answer] = texts.get((event.index, event.answer), "") + event.text
    assert texts == {(each.index, each.answer): each.text for each in done}
    with pytest.raises(ValueError, match=r"n: got 2; allowed: 1 for a request of the engine"):
        llm.engine.add_request([4], SamplingParams(n=2))
    with pytest.raises(ValueError, match="n: got 0; allowed: 1 to"):
        SamplingParams(n=0)


def test_stop_strings_that_stay_and_those_that_come_too_early() -> None:
    llm = make_llm(tokenizer=tokenizer())
    text = tokenizer().decode(oracle(PROMPTS[0], NEW))
    stop = text[4:6]
    cut, kept, later = llm.generate(
        [PROMPTS[0]] * 3,
        [
            SamplingParams(max_tokens=NEW, stop=stop),
            SamplingParams(max_tokens=NEW, stop=stop, include_stop_str_in_output=True),
            SamplingParams(max_tokens=NEW, stop=stop, min_tokens=text.find(stop) + 3),
        ],
    )
    assert cut.text == text[: text.find(stop)] and kept.text == cut.text + stop and kept.token_ids == cut.token_ids
    assert later.text.startswith(kept.text) and len(later.token_ids) > len(cut.token_ids) and cut.stop_reason == kept.stop_reason == stop


@pytest.mark.parametrize("stop", [(), ("none of that",)])
def test_special_tokens_in_the_text(stop: tuple[str, ...]) -> None:
    llm = make_llm(tokenizer=tokenizer())
    bias = {0: 100.0}  # <pad>
    with_it, without = (
        llm.generate([[4]], SamplingParams(max_tokens=3, logit_bias=bias, stop=stop, skip_special_tokens=skip))[0] for skip in (False, True)
    )
    assert with_it.token_ids == without.token_ids == [0, 0, 0]
    assert (with_it.text, without.text) == ("<pad><pad><pad>", "")


def test_a_tokenizer_by_path_and_get_tokenizer(tmp_path: Any) -> None:
    chat_tokenizer().save_pretrained(tmp_path)
    llm = LLM(tiny(), tokenizer=str(tmp_path), num_pages=16)
    assert llm.get_tokenizer() is llm.tokenizer and llm.get_tokenizer()("Hi").input_ids == tokenizer()("Hi").input_ids
    with pytest.raises(ValueError, match="this LLM has no tokenizer"):
        make_llm().get_tokenizer()
    with pytest.raises(ValueError, match=r"no tokenizer at '.*nowhere': not a directory"):
        LLM(tiny(), tokenizer=tmp_path / "nowhere")


def test_the_same_over_http() -> None:
    with serving() as running:
        the_same_over_http(running)


def the_same_over_http(running: Running) -> None:
    first = oracle(PROMPTS[0], NEW)
    word = tokenizer().decode(first[3:5])
    body = {"prompt": PROMPTS[0], "max_tokens": NEW, "temperature": 0, "return_token_ids": True}

    def answer(**fields: Any) -> dict[str, Any]:
        return dict(running.http.post("/v1/completions", json={**body, **fields}).raise_for_status().json()["choices"][0])

    assert word not in answer(bad_words=[word])["text"]
    assert answer(stop_token_ids=[first[2]])["token_ids"] == first[: first.index(first[2]) + 1]
    expected = oracle(PROMPTS[0], NEW, min_new_tokens=6, eos_token_id=first[2])
    assert answer(stop_token_ids=[first[2]], min_tokens=6)["token_ids"] == expected
    assert answer(stop=[word], include_stop_str_in_output=True)["text"].endswith(word)
    assert answer(skip_special_tokens=False, logit_bias={"0": 100}, max_tokens=2)["text"] == "<pad><pad>"
    refused = running.http.post("/v1/completions", json={**body, "min_tokens": NEW + 1})
    assert refused.status_code == 400 and "min_tokens: got 15; allowed: at most max_tokens" in refused.json()["error"]["message"]


def test_nothing_waits_for_the_device() -> None:
    """What the host must know for bad words and least tokens is what it knows: steps overlap with them in the batch."""
    llm = make_llm(overlap=True)
    request = llm.engine.add_request([4, 5], SamplingParams(max_tokens=4, min_tokens=3, bad_words=[(1, 2)]))
    llm.engine.step()
    llm.engine.step()
    assert request.num_pending == 1 and not request.params.needs_host
    assert torch.is_tensor(llm.engine.sampler._last)


@BOTH
def test_without_a_limit_an_answer_goes_on_to_max_model_len(overlap: bool) -> None:
    llm = make_llm(overlap=overlap, max_model_len=50)
    for prompt, got in zip(PROMPTS, llm.generate(PROMPTS, SamplingParams(max_tokens=None)), strict=True):
        assert got.token_ids == oracle(prompt, 51 - len(prompt)) and got.finish_reason == "length"
    (ended,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=None, stop_token_ids=[oracle(PROMPTS[0])[2]]))
    assert ended.finish_reason == "stop" and len(ended.token_ids) <= 3
    with pytest.raises(ValueError, match="51 tokens > 50, max_model_len"):
        llm.generate([[5] * 51], SamplingParams(max_tokens=None))
    assert_nothing_left(llm)


def test_without_a_limit_an_answer_may_fill_the_pool() -> None:
    llm = make_llm(num_pages=9)
    (got,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=None))
    assert got.token_ids == oracle(PROMPTS[0], llm.engine.input_processor.room - len(PROMPTS[0]) + 1) and got.finish_reason == "length"
    with pytest.raises(ValueError, match="can never fit"):
        llm.generate([[5] * 60], SamplingParams(max_tokens=None))
    assert_nothing_left(llm)


def test_a_limit_that_is_stated_as_none_goes_before_the_checkpoints() -> None:
    defaults = SamplingParams(max_new_tokens=3)
    assert SamplingParams(max_tokens=None).over(defaults).max_new_tokens is None and SamplingParams().over(defaults).max_new_tokens == 3
