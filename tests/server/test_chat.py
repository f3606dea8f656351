"""POST /v1/chat/completions: the tokenizer's template, whole and streamed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from paged_attn.engine.requests.token_texts import byte_of
from tests.engine.models import make_engine, make_llm, oracle, tokenizer
from tests.server.serving import MODEL, Running, chat_tokenizer, serving
from tests.tiny_models import build

MESSAGES: list[Any] = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
PROMPT = "system> Be kind; user> Hello; assistant>"


def chat(running: Running, messages: Any = MESSAGES, **settings: Any) -> Any:
    extra = {"return_token_ids": True, **settings.pop("extra_body", {})}
    return running.client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra, **{"temperature": 0, **settings})


def text_of(ids: list[int]) -> str:
    return str(tokenizer().decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_the_answer_continues_the_template(running: Running, limit: str) -> None:
    ids = tokenizer()(PROMPT).input_ids
    got = chat(running, **{limit: 8})
    (choice,) = got.choices
    assert choice.prompt_token_ids == ids and choice.token_ids == oracle(ids, 8)
    assert (choice.message.role, choice.message.content) == ("assistant", text_of(oracle(ids, 8)))
    assert (got.object, choice.finish_reason, got.usage.completion_tokens) == ("chat.completion", "length", 8)


def test_without_a_limit_it_goes_on_to_the_models_last_position(running: Running) -> None:
    choice = chat(running).choices[0]
    assert len(choice.token_ids) == 256 - len(tokenizer()(PROMPT).input_ids) + 1 and choice.finish_reason == "length"


def test_a_stream_gives_the_role_the_text_and_the_end(running: Running) -> None:
    whole = chat(running, max_tokens=8).choices[0].message.content
    chunks = list(chat(running, max_tokens=8, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert choices[0].delta.role == "assistant" and not any(choice.delta.role for choice in choices[1:])
    assert "".join(choice.delta.content or "" for choice in choices) == whole
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_text_parts_and_an_answer_sent_back_are_taken(running: Running) -> None:
    parts = [{"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind"}]}, MESSAGES[1]]
    first = chat(running, parts, max_tokens=3).choices[0]
    assert first.prompt_token_ids == tokenizer()(PROMPT).input_ids
    again = chat(running, [*MESSAGES, first.message.model_dump(), {"role": "user", "content": "Go on"}], max_tokens=3).choices[0]
    assert text_of(again.prompt_token_ids) == f"{PROMPT} {first.message.content}; user> Go on; assistant>"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_hold_text_bytes_and_the_likeliest(running: Running, stream: bool) -> None:
    got = chat(running, max_tokens=4, logprobs=True, top_logprobs=2, stream=stream)
    choices = [choice for chunk in got for choice in chunk.choices] if stream else got.choices
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert "".join(token.token for token in tokens) == text_of(oracle(tokenizer()(PROMPT).input_ids, 4)) and len(tokens) == 4
    for token in tokens:
        assert token.bytes == list(token.token.encode()) and len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob > token.top_logprobs[1].logprob > -math.inf


def test_the_prompt_of_a_chat_is_scored_as_that_of_a_completion(running: Running) -> None:
    got = chat(running, max_tokens=2, n=2, extra_body={"prompt_logprobs": 1})
    same = running.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 1}).json()["choices"][0]
    assert got.prompt_logprobs == same["prompt_logprobs"] and got.prompt_logprobs[0] is None
    assert len(got.prompt_logprobs) == got.usage.prompt_tokens and not hasattr(chat(running, max_tokens=1), "prompt_logprobs")
    refused = running.http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True, "prompt_logprobs": 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_characters_have_their_bytes(stream: bool) -> None:
    own = Tokenizer(BPE(vocab={character: byte for character, byte in byte_of().items()}, merges=[]))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    speaks = PreTrainedTokenizerFast(tokenizer_object=own, chat_template="{{ messages[0].content }}")
    text = "é東🙂"
    with serving(lambda: make_engine(build("qwen3", vocab_size=256), speaks)) as running:
        asked: Any = {"max_tokens": 20, "logprobs": True, "top_logprobs": 1, "stream": stream, "extra_body": {"regex": text}}
        got = chat(running, [{"role": "user", "content": "Hi"}], **asked)
        choices = [choice for chunk in got for choice in chunk.choices] if stream else got.choices
        tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert bytes(byte for token in tokens for byte in token.bytes).decode() == text
    assert {token.token for token in tokens} == {f"token_id:{byte}" for byte in text.encode()}


def test_the_template_alone_says_which_special_tokens_there_are() -> None:
    own = chat_tokenizer()
    own._tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    with serving(lambda: make_engine(tokenizer=own)) as running:
        assert chat(running, max_tokens=1).choices[0].prompt_token_ids == tokenizer()(PROMPT).input_ids
        body = {"prompt": PROMPT, "max_tokens": 1, "return_token_ids": True}
        got = running.http.post("/v1/completions", json=body).json()["choices"][0]["prompt_token_ids"]
        assert got == [0, *tokenizer()(PROMPT).input_ids]


def test_top_logprobs_need_logprobs(running: Running) -> None:
    reply = running.http.post("/v1/chat/completions", json={"messages": MESSAGES, "top_logprobs": 2})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "top_logprobs")


def test_a_model_without_template_says_so_and_completes() -> None:
    with serving(lambda: make_engine(tokenizer=tokenizer())) as running:
        reply = running.http.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert reply.status_code == 400 and "no chat template" in reply.json()["error"]["message"]
        assert running.client.completions.create(model=MODEL, prompt="Hi", max_tokens=2).usage


def test_a_model_without_tokenizer_takes_token_ids_alone() -> None:
    with serving(make_engine) as running:
        for path, body in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "Hi"})):
            reply = running.http.post(f"/v1/{path}", json=body)
            assert reply.status_code == 400 and "no tokenizer" in reply.json()["error"]["message"]
        body = {"prompt": [4, 5], "max_tokens": 3, "temperature": 0, "return_token_ids": True, "logprobs": 1}
        choice = running.http.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["token_ids"] == oracle([4, 5], 3) and choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in oracle([4, 5], 3)]


def test_the_templates_own_refusal_and_settings_reach_the_client() -> None:
    own = chat_tokenizer()
    own.chat_template = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}{{ mood + messages[0].content }}"
    with serving(lambda: make_engine(tokenizer=own)) as running:
        reply = running.http.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert reply.status_code == 400 and "users first" in reply.json()["error"]["message"]
        settings = {"max_tokens": 2, "extra_body": {"chat_template_kwargs": {"mood": "glad"}}}
        (want,) = make_llm(tokenizer=tokenizer()).generate("gladHello")
        assert chat(running, MESSAGES[1:], **settings).choices[0].prompt_token_ids == want.prompt_token_ids
        bad = {"messages": MESSAGES[1:], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
        assert "may not hold chat_template" in running.http.post("/v1/chat/completions", json=bad).json()["error"]["message"]
