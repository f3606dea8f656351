"""`n`, `logit_bias`, `response_format` and the other ways to guide an answer, over HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from paged_attn import SamplingParams
from tests.engine.models import oracle, random_prompts, tokenizer
from tests.engine.sampling.test_guides import COMPACT, PERSON
from tests.server.serving import MODEL, Running
from tests.server.test_bad_requests import post
from tests.server.test_chat import MESSAGES, chat
from tests.server.test_completions import TEXT, complete, expected

SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_to_each_prompt_each_of_its_own_seed(running: Running, stream: bool) -> None:
    prompts = random_prompts(3, 9, 14)
    got = complete(running, prompts, n=3, seed=2**64 - 2, temperature=1.0, max_tokens=8, stream=stream)
    found: list[list[int]] = [[] for _ in range(6)]
    for choice in [choice for chunk in got for choice in chunk.choices] if stream else got.choices:
        found[choice.index] += getattr(choice, "token_ids", None) or []
    seeds = (2**64 - 2, 2**64 - 1, 0)
    assert found == [expected(p, max_new_tokens=8, temperature=1.0, seed=seed).token_ids for p in prompts for seed in seeds]
    assert len({tuple(tokens) for tokens in found}) == 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_with_several_answers_counts_once(running: Running, stream: bool) -> None:
    prompt = random_prompts(77, 21)[0]
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for cached in (0, 20):
        got = complete(running, prompt, n=4, max_tokens=3, **options)
        used = list(got)[-1].usage if stream else got.usage
        assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (21, 12, 33)
        assert used.prompt_tokens_details.cached_tokens == cached
        running.wait_idle()
    running.engine.kv.tree.clear()  # type: ignore[union-attr]


def test_what_is_said_of_a_prompt_counts_the_clients_prompts(running: Running) -> None:
    _, error = post(running, "/v1/completions", {"prompt": [[5], [6], [-1]], "n": 4})
    assert error["message"].endswith("(prompt 3 of 3)")
    assert "prompt 0" not in post(running, "/v1/completions", {"prompt": [-1], "n": 4})[1]["message"]


def test_a_chat_with_several_answers_opens_each_of_them(running: Running) -> None:
    whole = [choice.message.content for choice in chat(running, n=2, temperature=1.0, seed=4, max_tokens=6).choices]
    parts = [choice for chunk in chat(running, n=2, temperature=1.0, seed=4, max_tokens=6, stream=True) for choice in chunk.choices]
    for index, text in enumerate(whole):
        mine = [part for part in parts if part.index == index]
        assert mine[0].delta.role == "assistant" and "".join(part.delta.content or "" for part in mine) == text
    assert whole[0] != whole[1]


def test_biases_come_by_token_ids_written_as_texts(running: Running) -> None:
    ids = tokenizer()(TEXT).input_ids
    first = oracle(ids, 1)[0]
    got = complete(running, TEXT, max_tokens=4, logit_bias={str(first): -100, "40": 100}).choices[0]
    assert got.token_ids == [40] * 4
    assert complete(running, TEXT, max_tokens=4, logit_bias={}).choices[0].token_ids == oracle(ids, 4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_answers_by_its_schema(running: Running, stream: bool) -> None:
    for seed in range(3):
        got = chat(running, response_format=SCHEMA, temperature=1.2, seed=seed, stream=stream)
        choices = [choice for chunk in got for choice in chunk.choices] if stream else got.choices
        text = "".join(choice.delta.content or "" for choice in choices) if stream else choices[0].message.content
        assert list(json.loads(text)) == ["name", "age", "tags"] and choices[-1].finish_reason == "stop"


def test_any_json_object_and_plain_text(running: Running) -> None:
    text = chat(running, response_format={"type": "json_object"}, max_tokens=12).choices[0].message.content
    assert text.startswith("{")
    assert chat(running, response_format={"type": "text"}, max_tokens=5).choices[0] == chat(running, max_tokens=5).choices[0]


def test_extensions_guide_completions_and_chats(running: Running) -> None:
    got = complete(running, [TEXT, "She"], n=2, temperature=1.0, seed=1, extra_body={"regex": "[a-d]{5}"})
    assert all(re.fullmatch("[a-d]{5}", choice.text) and choice.finish_reason == "stop" for choice in got.choices)
    assert len(got.choices) == 4
    grammar = 'start: "yes" | "no"'
    assert complete(running, TEXT, extra_body={"grammar": grammar}).choices[0].text in ("yes", "no")
    assert chat(running, extra_body={"grammar": grammar}).choices[0].message.content in ("yes", "no")
    schema = {"enum": ["a", "b"], **COMPACT}
    got = complete(running, TEXT, extra_body={"json_schema": schema}).choices[0]
    assert got.text in ('"a"', '"b"') and got.token_ids == expected(TEXT, json_schema=schema).token_ids


@pytest.mark.parametrize(
    ("bad", "param", "words"),
    [
        ({"n": 0}, "n", "n: got 0; allowed: 1 to 128"),
        ({"n": 129}, "n", "n: got 129"),
        ({"n": 2.0}, "n", "n: Input should be a valid integer"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias: got 'a'; allowed: token ids, written as texts"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "got '-1'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "allowed: token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias: got 101.0 for token 5; allowed: {token id: number from -100 to 100}"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias", "got nan"),
        ({"logit_bias": {"5": "1"}}, "logit_bias", "valid number"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "got 1,025 tokens; allowed: at most 1,024"),
        ({"logit_bias": {"96": 1}}, "logit_bias", "logit_bias: got token id 96; allowed: 0 to 95"),
        ({"regex": "a(b"}, "regex", "unclosed group"),
        ({"regex": "a", "grammar": "start: /a/"}, "grammar", "got one beside regex"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos: got True beside regex"),
        ({"json_schema": {"not": {}}}, "json_schema", "Unimplemented keys"),
        ({"json_schema": "{}"}, "json_schema", "valid dictionary"),
    ],
)
def test_what_is_wrong_is_said_of_the_field_that_is_at_fault(running: Running, bad: dict[str, Any], param: str, words: str) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        status, error = post(running, path, {**body, **bad})
        assert (status, error["param"].split(".")[0]) == (400, param) and words in error["message"]
    assert running.metric("failed_steps_total") == 0


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"type": "json_schema"}, "its field json_schema is missing"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "belongs to type"),
        ({"type": "xml"}, "'text', 'json_object' or 'json_schema'"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "Field required"),
    ],
)
def test_formats_that_are_none(running: Running, wanted: dict[str, Any], words: str) -> None:
    status, error = post(running, "/v1/chat/completions", {"messages": MESSAGES, "response_format": wanted})
    assert status == 400 and words in error["message"] and error["param"].startswith("response_format")
    both = {"messages": MESSAGES, "response_format": SCHEMA, "json_schema": {}}
    assert "give one of them" in post(running, "/v1/chat/completions", both)[1]["message"]


def test_a_guide_that_fails_midway_says_so_and_the_server_goes_on(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def guide_of_nothing(params: SamplingParams) -> Any:
        found = make(params)
        if found is not None:
            found.goes_on_after(1)  # a space, which the expression does not allow
        return found

    guides = running.engine.input_processor.guides
    make = guides.guide
    monkeypatch.setattr(guides, "guide", guide_of_nothing)
    status, error = post(running, "/v1/completions", {"prompt": "a", "regex": "[b-d]+"})
    assert (status, error["code"]) == (400, "guide_failed") and "doesn't satisfy the grammar" in error["message"]
    monkeypatch.undo()
    assert complete(running, "a", extra_body={"regex": "[b-d]{2}"}).choices[0].finish_reason == "stop"
    assert running.client.models.list().data[0].id == MODEL
