"""`echo`, `logprobs` of prompts and `prompt_logprobs` of /v1/completions: the model's own numbers, in OpenAI's and in vLLM's form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from paged_attn.server.api import bodies
from paged_attn.server.api.replies import finite
from tests.engine.models import make_engine, oracle, random_prompts, tiny, tokenizer
from tests.server.serving import MODEL, Running, serving

TEXT = "It was a dark night"
LONG = random_prompts(12, 90)[0]


def own_scores(ids: list[int]) -> list[list[float]]:
    with torch.no_grad():
        return tiny()(torch.tensor([ids])).logits[0].log_softmax(-1).tolist()


def complete(running: Running, prompt: Any, **settings: Any) -> Any:
    return running.client.completions.create(model=MODEL, prompt=prompt, **{"temperature": 0, **settings})


def merged(chunks: Any, index: int) -> tuple[str, dict[str, list[Any]]]:
    """Text and logprobs of an answer that came in parts."""
    parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in lists.items() if part.logprobs else ():
            values += getattr(part.logprobs, name)
    return "".join(part.text for part in parts), lists


def assert_logprobs(ids: list[int], found: dict[str, list[Any]], count: int) -> None:
    """All of these tokens, with their texts one after another."""
    texts = [tokenizer().decode([i]) for i in ids]
    assert found["tokens"] == texts and found["token_logprobs"][0] is None is found["top_logprobs"][0]
    assert found["text_offset"] == [sum(map(len, texts[:i])) for i in range(len(ids))]
    for token, row, value, top in zip(ids[1:], own_scores(ids), found["token_logprobs"][1:], found["top_logprobs"][1:], strict=False):
        best = sorted(range(len(row)), key=lambda i: -row[i])[:count]
        assert value == pytest.approx(row[token], abs=1e-4)
        assert top == pytest.approx({tokenizer().decode([i]): row[i] for i in {*best, token}}, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("new", [0, 1, 5])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_prompt_comes_first_with_its_logprobs(running: Running, count: int, new: int, stream: bool) -> None:
    prompts = [tokenizer()(TEXT).input_ids, LONG, [7], [4, 5]]
    got = complete(running, prompts, echo=True, logprobs=count, max_tokens=new, stream=stream)
    chunks = list(got) if stream else [got]
    for index, prompt in enumerate(prompts):
        ids = prompt + (oracle(prompt, new) if new else [])
        text, found = merged(chunks, index)
        assert text == tokenizer().decode(ids)
        assert_logprobs(ids, found, count)


def test_a_text_is_echoed_as_it_was_sent(running: Running) -> None:
    plain = complete(running, [TEXT, "She"], echo=True, max_tokens=3, extra_body={"return_token_ids": True})
    for choice, text in zip(plain.choices, (TEXT, "She"), strict=True):
        assert choice.text == text + tokenizer().decode(oracle(tokenizer()(text).input_ids, 3))
        assert choice.logprobs is None and choice.token_ids == oracle(tokenizer()(text).input_ids, 3)
    assert plain.usage.completion_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_each_have_the_prompt(running: Running, stream: bool) -> None:
    got = complete(running, [[4, 5, 6], [7, 8]], echo=True, logprobs=1, max_tokens=2, n=2, temperature=1, seed=3, stream=stream)
    chunks = list(got) if stream else [got]
    for index, prompt in enumerate([[4, 5, 6]] * 2 + [[7, 8]] * 2):
        text, found = merged(chunks, index)
        assert text.startswith(tokenizer().decode(prompt)) and len(found["tokens"]) == len(prompt) + 2
        own = own_scores(prompt)
        assert found["token_logprobs"][1 : len(prompt)] == pytest.approx([own[i][t] for i, t in enumerate(prompt[1:])], abs=1e-4)


def test_prompt_logprobs_as_vllms_server_has_them(running: Running) -> None:
    body = {"prompt": LONG, "max_tokens": 0, "prompt_logprobs": 2}
    answer = running.http.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("", None, "length")
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(LONG)
    for token, row, got in zip(LONG[1:], own_scores(LONG), choice["prompt_logprobs"][1:], strict=False):
        best = sorted(range(len(row)), key=lambda i: -row[i])[:2]
        assert {int(i): each["logprob"] for i, each in got.items()} == pytest.approx({i: row[i] for i in {*best, token}}, abs=1e-4)
        assert all(each["decoded_token"] == tokenizer().decode([int(i)]) for i, each in got.items())
        assert sorted(got, key=lambda i: got[i]["rank"]) == sorted(got, key=lambda i: -got[i]["logprob"])
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (90, 0)


def test_both_forms_at_once_have_as_many_as_each_asks_for(running: Running) -> None:
    got = complete(running, [4, 5, 6], echo=True, logprobs=1, max_tokens=1, extra_body={"prompt_logprobs": 3}).choices[0]
    assert [len(top) for top in got.logprobs.top_logprobs[1:]] == [len({*own, token}) for own, token in likely([4, 5, 6], 1)]
    assert [len(row) for row in got.prompt_logprobs[1:]] == [len({*own, token}) for own, token in likely([4, 5, 6], 3)[:2]]


def likely(prompt: list[int], count: int) -> list[tuple[list[int], int]]:
    """The most likely tokens at each place, and the token that is there."""
    ids = prompt + oracle(prompt, 1)
    return [(sorted(range(len(row)), key=lambda i: -row[i])[:count], t) for row, t in zip(own_scores(ids), ids[1:], strict=False)]


def test_the_same_prompt_again_gives_the_same_and_nothing_from_the_cache(running: Running) -> None:
    first, second = (complete(running, LONG, echo=True, logprobs=1, max_tokens=1) for _ in range(2))
    assert second.usage.prompt_tokens_details.cached_tokens == 0
    assert first.choices[0].logprobs.token_logprobs[1:] == pytest.approx(second.choices[0].logprobs.token_logprobs[1:], abs=1e-5)


def test_scores_are_counted_before_they_are_made(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_SCORES", 2 * 90 * 2)
    body = {"prompt": [LONG] * 2, "max_tokens": 1, "logprobs": 1, "echo": True}
    assert running.http.post("/v1/completions", json=body).status_code == 200
    for more in ({"prompt": [*[LONG] * 2, [4]]}, {"logprobs": 2}, {"n": 2}, {"prompt_logprobs": 3}):
        reply = running.http.post("/v1/completions", json={**body, **more})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
        assert "allowed: at most 360; send fewer prompts at a time, or lower logprobs" in reply.json()["error"]["message"]
    assert running.http.post("/v1/completions", json={**body, "n": 5, "echo": False}).status_code == 200


def test_offsets_count_no_space_that_a_decoder_drops() -> None:
    """As Llama 2's and Mistral's does: the text of a prompt or an answer does not begin with the space of its first token."""
    vocab = {"<unk>": 0, "▁": 1, **{chr(code): code - 31 for code in range(33, 127)}}
    made = Tokenizer(BPE(vocab, [], unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    own = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    with serving(lambda: make_engine(tokenizer=own)) as running:
        regex = {"regex": " yes no"}
        choice = complete(running, "a b", echo=True, logprobs=0, max_tokens=9, extra_body=regex).choices[0]
        assert choice.text == "a byes no"
        tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
        assert tokens == [" ", "a", " ", "b", " ", "y", "e", "s", " ", "n", "o"] and offsets == [0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 8]
        running.wait_idle()


def test_without_a_tokenizer_tokens_have_numbers() -> None:
    with serving(make_engine) as running:
        choice = complete(running, [4, 5, 6], echo=True, logprobs=1, max_tokens=0).choices[0]
        assert (choice.text, choice.logprobs.tokens) == ("", ["token_id:4", "token_id:5", "token_id:6"])
        assert choice.logprobs.text_offset == [0, 0, 0]


def test_a_token_of_no_probability_is_a_number_in_json() -> None:
    assert finite(float("-inf")) == -9999.0 and finite(-3.5) == -3.5
