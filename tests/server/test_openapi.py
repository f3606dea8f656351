"""/openapi.json says what the routes do: who makes requests and clients of it is not misled."""

from __future__ import annotations

from typing import Any

import pytest

from paged_attn.server.api.routes import CHATS, COMPLETIONS
from tests.server.serving import Running, serving


@pytest.fixture(scope="module")
def running() -> Any:
    with serving() as running:
        yield running


def responses(running: Running, path: str) -> Any:
    return running.http.get("/openapi.json").json()["paths"][path]["post"]["responses"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "Hi"}), (CHATS, {"messages": [{"role": "user", "content": "Hi"}]})])
def test_both_kinds_of_answers_are_described(running: Running, path: str, prompt: dict[str, Any], stream: bool) -> None:
    reply = running.http.post(path, json={**prompt, "max_tokens": 2, "stream": stream})
    assert reply.status_code == 200 and reply.headers["content-type"].partition(";")[0] in responses(running, path)["200"]["content"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_errors_have_the_form_that_is_described(running: Running, path: str) -> None:
    described = responses(running, path)
    assert "422" not in described and {"400", "401", "404", "408", "413", "429", "499", "500", "503", "504", "default"} <= set(described)
    document = running.http.get("/openapi.json").json()
    detail = document["components"]["schemas"]["ErrorDetail"]
    reply = running.http.post(path, json={"nothing": 1})
    assert reply.status_code == 400 and set(reply.json()["error"]) == set(detail["required"])


def test_limits_are_told(running: Running) -> None:
    fields = running.http.get("/openapi.json").json()["components"]["schemas"]["CompletionBody"]["properties"]
    assert fields["n"]["maximum"] == 128 and fields["logprobs"]["maximum"] == 20
    assert "4096" in str(fields["cache_salt"]) and "1024" in str(fields["stop"]) and "anyOf" in fields["prompt"]
