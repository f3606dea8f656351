"""/tokenize, /detokenize, /version and /docs."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from paged_attn import __version__
from paged_attn.server.api.docs_page import kind, page
from tests.engine.models import make_engine, tokenizer
from tests.server.serving import MODEL, Running, serving

TEXT = "Hello, there"


def test_a_text_becomes_tokens_and_they_become_the_text(running: Running) -> None:
    ids = tokenizer()(TEXT).input_ids
    reply = running.http.post("/tokenize", json={"model": MODEL, "prompt": TEXT, "return_token_strs": True}).json()
    strings = tokenizer().convert_ids_to_tokens(ids)
    assert reply == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": strings}
    assert running.http.post("/tokenize", json={"prompt": TEXT}).json()["token_strs"] is None
    assert running.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": TEXT}
    assert running.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_the_longest_request_is_what_the_pool_holds_where_that_is_less_than_the_positions() -> None:
    with serving(lambda: make_engine(tokenizer=tokenizer(), num_pages=11)) as small:
        told = small.http.get("/v1/models").json()["data"][0]["max_model_len"]
        assert (
            told == small.http.post("/tokenize", json={"prompt": TEXT}).json()["max_model_len"] == small.engine.input_processor.room < 256
        )
        body = {"model": MODEL, "prompt": [4] * (told - 2), "max_tokens": 2, "ignore_eos": True}
        assert small.http.post("/v1/completions", json=body).status_code == 200
        assert small.http.post("/v1/completions", json={**body, "prompt": [4] * (told + 1)}).status_code == 400


def test_special_tokens_are_added_unless_they_are_not_wanted() -> None:
    from tokenizers.processors import TemplateProcessing

    from tests.server.serving import chat_tokenizer

    own = chat_tokenizer()
    own.backend_tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    with serving(lambda: make_engine(tokenizer=own)) as running:
        ids = tokenizer()(TEXT).input_ids
        assert running.http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"] == [0, *ids]
        assert running.http.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False}).json()["tokens"] == ids
        chat = running.http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
        assert chat["tokens"] == tokenizer()("user> Hi; assistant>").input_ids


def test_messages_become_the_tokens_that_a_chat_has(running: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    reply = running.http.post("/tokenize", json={"messages": messages}).json()
    chat = running.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert reply["count"] == chat["usage"]["prompt_tokens"] == len(reply["tokens"])
    short = running.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert short["tokens"] == tokenizer()("user> Hi; ").input_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True, "add_generation_prompt": True},
         "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
        ("/tokenize", {"prompt": "\ud83d"}, "prompt"),
        ("/tokenize", {"prompt": "x" * 10_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [96]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/detokenize", {"tokens": [1] * (2**18 + 1)}, "tokens"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_said(running: Running, path: str, body: dict[str, Any], param: str) -> None:
    reply = running.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_another_model_is_unknown(running: Running) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}), ("/v1/responses", {"input": "a"})):
        reply = running.http.post(path, json={**body, "model": "other"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_without_a_tokenizer_both_say_so() -> None:
    with serving(make_engine) as running:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            reply = running.http.post(path, json=body)
            assert reply.status_code == 400 and "no tokenizer" in reply.json()["error"]["message"]


def test_the_version_is_told(running: Running) -> None:
    assert running.http.get("/version").json() == {"version": __version__}


def test_the_docs_need_nothing_from_elsewhere(running: Running) -> None:
    reply = running.http.get("/docs")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in reply.text and not re.search(r"(src|href)=['\"]?(https?:)?//", reply.text)
    for path in running.http.get("/openapi.json").json()["paths"]:
        assert path in reply.text
    assert "max_output_tokens" in reply.text and running.http.get("/redoc").status_code == 404


def test_the_docs_page_escapes_what_it_shows() -> None:
    schema = {"properties": {"<a>": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"const": "<b>"}]}, "minimum": 1}}}
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/B"}}}}
    paths = {"/<p>": {"post": {"description": "<i>", "requestBody": body}}}
    text = page({"info": {"title": "<t>", "version": "1"}, "paths": paths, "components": {"schemas": {"B": schema}}})
    assert not re.search("<[abit]>", text.replace("<p>", "")) and "<p>&lt;i&gt;</p>" in text
    assert "list of integer or &#x27;&lt;b&gt;&#x27;" in text
    assert kind({"$ref": "#/components/schemas/B"}) == "B" and kind({}) == "anything"


def test_the_docs_are_closed_to_other_hosts() -> None:
    with serving(allow_hosts=("127.0.0.1",)) as running:
        for path in ("/docs", "/version", "/tokenize"):
            assert httpx.get(f"{running.url}{path}", headers={"Host": "evil.example"}).status_code == 400
