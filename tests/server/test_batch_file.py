"""Reading a file of requests and a file of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paged_attn.server.batch_file import BatchRequest, answered_ids, read_requests

BODY = {"prompt": "a"}


def line(**fields: Any) -> str:
    return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY, **fields}) + "\n"


def test_requests_in_order_without_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(line() + "\n" + line(custom_id="ü", url="/v1/score"))
    assert list(read_requests(path)) == [BatchRequest("a", "/v1/completions", BODY), BatchRequest("ü", "/v1/score", BODY)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("{", "not JSON"),
        ("[]", "each line is an object with the text custom_id"),
        (line(custom_id=3), "each line is an object with the text custom_id"),
        (line(), "custom_id 'a' was used before"),
        (line(custom_id="b", method="GET"), "method is 'GET'; allowed is POST"),
        (line(custom_id="b", url="/metrics"), "url is '/metrics'; allowed are /v1/chat/completions, "),
        (line(custom_id="b", body="x"), "body is 'x'; it must be an object"),
        (line(custom_id="b", body={"stream": True}), "stream is True; a file has no streams"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, wrong: str, words: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(line() + wrong)
    with pytest.raises(ValueError, match=r"requests\.jsonl, line 2") as told:
        list(read_requests(path))
    assert words in str(told.value)


def test_an_answer_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"custom_id": "ü"}\n{"custom_id": "b", "resp')
    assert answered_ids(path) == {"ü"} and path.read_text() == '{"custom_id": "ü"}\n'
    path.write_text("x\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 1: not JSON"):
        answered_ids(path)
