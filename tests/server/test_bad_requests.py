"""Whatever a client sends: 4xx in OpenAI's form with the reason, and the server goes on."""

from __future__ import annotations

import json
import random
from typing import Any

import openai
import pytest

from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.server.api.bodies import CompletionBody
from tests.engine.models import oracle
from tests.server.serving import MODEL, Running
from tests.tiny_models import VOCAB

ID_LISTS = "a text, a list of texts, a list of token ids, or a list of such lists"
BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", f"prompt is null; allowed are {ID_LISTS}"),
    ({"prompt": []}, "prompt", "prompt is an empty list"),
    ({"prompt": ["a", 1]}, "prompt", "prompt is a list of other things"),
    ({"prompt": [True]}, "prompt", "prompt is a list of other things"),
    ({"prompt": {"a": 1}}, "prompt", "prompt is a dict"),
    ({"prompt": ""}, "prompt", "the prompt is empty"),
    ({"prompt": [[1], []]}, "prompt", "the prompt is empty; give at least one token"),
    ({"prompt": [5, 96]}, "prompt", "token id 96 at position 1 of the prompt is out of range; this model has ids 0 to 95"),
    ({"prompt": [[5], [-1]]}, "prompt", "(prompt 2 of 2)"),
    ({"prompt": [10**30]}, "prompt", "out of range"),
    ({"prompt": [1] * 257}, "prompt", "the prompt is too long: 257 tokens > 256, the model's positions; shorten it by 1"),
    ({"prompt": "\ud800"}, "prompt", "half of a surrogate pair"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens: got -1; allowed: an int >= 0"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens: Input should be a valid integer; got '5'"),
    ({"max_tokens": 2.5}, "max_tokens", "max_tokens: Input should be a valid integer"),
    ({"temperature": -1}, "temperature", "temperature: got -1.0; allowed: 0 or a finite number"),
    ({"temperature": float("nan")}, "temperature", "temperature: got nan"),
    ({"temperature": True}, "temperature", "temperature: Input should be a valid number"),
    ({"top_p": 0}, "top_p", "top_p: got 0.0; allowed: 0 < top_p <= 1"),
    ({"top_p": 1.5}, "top_p", "top_p: got 1.5"),
    ({"top_k": -2}, "top_k", "top_k: got -2"),
    ({"min_p": 2}, "min_p", "min_p: got 2.0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty: got 0.0"),
    ({"seed": -2}, "seed", "seed: got -2; allowed: an int >= 0; None or -1 draws a seed from entropy"),
    ({"seed": 2**64}, "seed", "reduce it modulo 2**64"),
    ({"stop": ""}, "stop", "stop: got an empty string"),
    ({"stop": ["a"] * 65}, "stop", "stop: got 65 strings; allowed: at most 64"),
    ({"stop": [1]}, "stop", "Input should be a valid string"),
    ({"stop_token_ids": [-2]}, "stop_token_ids", "stop_token_ids: got -2"),
    ({"logprobs": 21}, "logprobs", "logprobs: got 21; allowed: 0 to 20"),
    ({"logprobs": -1}, "logprobs", "logprobs: got -1"),
    ({"best_of": 2}, "best_of", "best_of=2 is not supported; use n with logprobs"),
    ({"best_of": True}, "best_of", "best_of=True is not supported"),
    ({"n": True}, "n", "n: Input should be a valid integer"),
    ({"echo": True, "logprobs": 21}, "logprobs", "logprobs: got 21; allowed: 0 to 20"),
    ({"echo": 1}, "echo", "echo: Input should be a valid boolean"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs: got -1; allowed: 0 to 20"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "prompt_logprobs: allowed only without stream, where completions"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "frequency_penalty: got 2.5; allowed: -2.0 to 2.0"),
    ({"presence_penalty": float("nan")}, "presence_penalty", "presence_penalty: got nan"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "its field json_schema is missing"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "allowed only with stream=true"),
    ({"bad_words": ["a", "\ud800"]}, "bad_words", "which holds half of a surrogate pair; allowed: text"),
    ({"best": 1}, "best", "unknown field 'best'"),
    ({"max_token": 1}, "max_token", "unknown field 'max_token'; did you mean 'max_tokens'?"),
    ({"structured_outputs": {}}, "structured_outputs", "got none of them; allowed: one of json, regex, choice"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "structured_outputs", "got regex, choice; allowed: one of json"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex", "got one beside structured_outputs, which is its newer"),
    ({"structured_outputs": {"json": "[1"}}, "structured_outputs", "structured_outputs.json: Expecting ',' delimiter"),
    ({"structured_outputs": {"json": "[" * 200_000}}, "structured_outputs", "structured_outputs.json: "),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs", "structured_outputs.json: got [1]; allowed: a JSON object"),
    ({"structured_outputs": {"regex": "a"}, "regex": "a"}, "structured_outputs", "got one beside regex; give one of them"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least 1 item"),
    ({"guided_choice": ["." * 4000] * 200}, "structured_outputs", "got 1,600,199 bytes of texts, with what is escaped"),
    ({"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}}, "structured_outputs", "Input should be False"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structural_tag", "unknown field 'structural_tag'"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "there is one: llguidance; leave it out"),
    ({"request_id": "a"}, "request_id", "send the header x-request-id"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "is as the tokenizer decodes it"),
    ({"length_penalty": 2}, "length_penalty", "there is no beam search"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "got []; allowed: a tuple, list or set of token ids, at least one"),
    ({"allowed_token_ids": [4, VOCAB]}, "allowed_token_ids", f"got token id {VOCAB}; allowed: 0 to {VOCAB - 1}"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "got 0; allowed: an int >= 1, or -1 for as many as there is room for"),
    ({"x" * 65: 1}, "x" * 65, "this server does not support it"),
]  # fmt: skip


def post(running: Running, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = running.http.post(path, content=content, headers={"Content-Type": "application/json"})
    return reply.status_code, reply.json()["error"]


@pytest.mark.parametrize(("bad", "param", "words"), BAD_COMPLETIONS, ids=[json.dumps(bad)[:40] for bad, _, _ in BAD_COMPLETIONS])
def test_a_bad_completion_request_gets_400_and_the_engines_words(running: Running, bad: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        streams = {"stream": True} if stream and "stream_options" not in bad else {}
        status, error = post(running, "/v1/completions", {"prompt": "Hello", **streams, **bad})
        assert (status, error["type"], error["param"].split(".")[0]) == (400, "invalid_request_error", param)
        assert words in error["message"] and set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "at least 1 item"),
        ("Hello", "messages", "Input should be a valid list"),
        ([{"content": "a"}], "messages.0.role", "messages.0.role: got None; allowed: a text such as 'user'"),
        ([{"role": "user"}], "messages.0.content", "got None; allowed: a text, or a list of text parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content", "a part is 'image_url'"),
        ([{"role": "user", "content": "a", "tool_calls": [1]}], "messages.0.tool_calls", "got one of role 'user'; allowed: of"),
        ([{"role": "user", "content": "a", "audio": {"id": 1}}], "messages.0.audio", "field 'audio' is not supported"),
        ([{"role": "user", "content": "a", "name": 3}], "messages.0.name", "got 3; allowed: a text"),
        ([{"role": "user", "content": "\udc00"}], "messages", "half of a surrogate pair"),
        ([{"role": "user", "content": "long " * 100}], "messages", "tokens > 256, the model's positions"),
    ],
)
def test_bad_messages_get_400(running: Running, messages: Any, param: str, words: str) -> None:
    status, error = post(running, "/v1/chat/completions", {"messages": messages})
    assert (status, error["param"]) == (400, param) and words in error["message"]


def test_a_top_k_beyond_every_vocabulary_is_one_that_tensors_hold() -> None:
    assert CompletionBody(prompt="a", top_k=10**30).sampling_params(1, SamplingParams()).top_k == 2**31 - 1


def test_two_limits_that_differ_are_refused(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "max_completion_tokens": 3}
    assert "give one of them" in post(running, "/v1/chat/completions", body)[1]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "the body is not JSON"),
        (b"[1]", "the body is not a JSON object"),
        (b"", "the body is not a JSON object"),
        (b'{"prompt": "\xff"}', "can't decode byte 0xff in position 12"),
        (b"[" * 100_000, "body"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "5000 digits"),
    ],
)
def test_a_body_that_is_no_json_object_gets_400(running: Running, body: bytes, words: str) -> None:
    status, error = post(running, "/v1/completions", body)
    assert status == 400 and words in error["message"]


def test_a_field_that_is_null_is_not_given_whatever_its_name(running: Running) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "guided_json": None, "structured_outputs": None, "nobody_knows_it": None}
    assert running.http.post("/v1/completions", json=body).status_code == 200


def test_other_models_routes_and_methods(running: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'; this server has 'tiny'"):
        running.client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.NotFoundError, match="there is no model 'a/b'"):
        running.client.models.retrieve("a/b")
    assert post(running, "/v1/completions", {"model": "\ud800", "prompt": "a"})[0] == 404
    status, error = post(running, "/chat/completions", {"model": MODEL})
    assert status == 404 and "a client's base URL is http://host:port/v1" in error["message"]
    for path, words in (
        ("/v1/nope", "what this server answers is listed at /docs"),
        ("/v1/load_lora_adapter", "started with --lora-folder DIR"),
    ):
        status, error = post(running, path, {})
        assert status == 404 and words in error["message"] and "base URL" not in error["message"]
    assert running.http.head("/health").status_code == 200  # as load balancers ask
    status, error = post(running, "/v1/embeddings", {"input": "a"})
    assert status == 400 and "generates and has no embeddings; serve it with --task embed" in error["message"]
    packed = running.http.post("/v1/completions", content=b"\x1f\x8b\0", headers={"Content-Encoding": "gzip"})
    assert packed.status_code == 415 and "the header Content-Encoding is 'gzip'; bodies are read as they are" in packed.text
    reply = running.http.get("/v1/completions")
    assert reply.headers["Allow"] == "POST" and "Method Not Allowed; allowed: POST" in reply.text
    assert (reply.status_code, reply.json()["error"]["code"]) == (405, "method_not_allowed")


def test_a_storm_of_random_bodies_leaves_the_server_whole(running: Running) -> None:
    rng = random.Random(1)
    odd = [
        None,
        True,
        -1,
        0,
        1,
        7,
        10**40,
        -(10**40),
        1e308,
        1e-308,
        float("inf"),
        float("nan"),
        "",
        "a",
        "\ud800",
        [],
        [0],
        [[0]],
        [None],
        {},
    ]
    odd += [{"a": 1}, ["x", "\udfff"], [[95], [1, 2]], [1] * 300, "long text " * 20]
    names = ["prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
             "seed", "stop", "stop_token_ids",
             "logprobs", "ignore_eos", "cache_salt", "priority", "stream", "n", "user", "return_token_ids"]  # fmt: skip
    statuses, failed = set(), running.metric("failed_steps_total")
    for _ in range(400):
        body = {"prompt": "Hello", "max_tokens": 2} | {rng.choice(names): rng.choice(odd) for _ in range(rng.randint(1, 2))}
        reply = running.http.post("/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert reply.status_code in (200, 400), (body, reply.text)
        statuses.add(reply.status_code)
    assert statuses == {200, 400} and running.metric("failed_steps_total") == failed
    body = {"prompt": [4, 5, 6], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    assert running.http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"] == oracle([4, 5, 6], 5)
