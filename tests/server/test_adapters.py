"""Adapters over HTTP: model= is their name; loaded and unloaded by clients from one folder, if the server allows it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from paged_attn import LLM
from tests.engine.lora.adapters import Adapters, base
from tests.engine.models import OVERLAP
from tests.oracle import random_prompts
from tests.server.serving import MODEL, Running, chat_tokenizer, serving

PROMPTS = random_prompts((5, 17, 9))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"), "llama", {"a": {}, "b": {"r": 2, "targets": ["v_proj", "o_proj"]}})


@pytest.fixture(scope="module")
def running(adapters: Adapters) -> Iterator[Running]:
    folder = str(Path(adapters.folders["a"]).parent)
    settings = {"page_size": 4, "num_pages": 200, "max_loras": 2, "overlap": OVERLAP}

    def engine() -> Any:
        llm = LLM(base(), tokenizer=chat_tokenizer(), **settings)
        llm.load_lora("a", adapters.folders["a"])
        return llm.engine

    with serving(engine, lora_folder=folder) as server:
        yield server


def complete(running: Running, model: str, prompt: list[int]) -> tuple[str, list[int]]:
    body = {"temperature": 0, "max_tokens": 8, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    answer = running.client.completions.create(model=model, prompt=prompt, **body)
    return answer.model, answer.choices[0].token_ids  # type: ignore[attr-defined]


def post(running: Running, what: str, **body: Any) -> tuple[int, Any]:
    answer = running.http.post(f"/v1/{what}_lora_adapter", json=body)
    return answer.status_code, answer.json()


def test_the_model_of_a_request_is_its_adapter(running: Running, adapters: Adapters) -> None:
    asked = [(which, prompt) for prompt in PROMPTS for which in (MODEL, "a")]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: complete(running, *each), asked))
    own = [adapters.generate(None if which == MODEL else which, prompt) for which, prompt in asked]
    assert answers == [(which, ids) for (which, _), ids in zip(asked, own, strict=True)]
    with pytest.raises(openai.NotFoundError, match="there is no model 'b'; this server has 'tiny', 'a'"):
        complete(running, "b", PROMPTS[0])
    chat = running.client.chat.completions.create(model="a", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    assert chat.model == "a"


def test_loaded_and_unloaded_by_clients(running: Running, adapters: Adapters) -> None:
    assert post(running, "load", lora_name="b", lora_path="b")[0] == 200
    listed = {model.id: getattr(model, "parent", None) for model in running.client.models.list()}
    assert listed == {MODEL: None, "a": MODEL, "b": MODEL}
    assert running.client.models.retrieve("b").id == "b"
    assert complete(running, "b", PROMPTS[1]) == ("b", adapters.generate("b", PROMPTS[1]))
    status, answer = post(running, "load", lora_name="b", lora_path=adapters.folders["b"])
    assert status == 400 and "an adapter 'b' is loaded from" in answer["error"]["message"]
    assert post(running, "unload", lora_name="b")[0] == 200
    status, answer = post(running, "unload", lora_name="b")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_one_in_use_stays(running: Running) -> None:
    with running.client.completions.create(
        model="a", prompt=PROMPTS[0], stream=True, max_tokens=200, temperature=0, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        status, answer = post(running, "unload", lora_name="a")
        assert (status, answer["error"]["code"]) == (409, "adapter_in_use")
        for _ in stream:
            pass
    running.wait_idle()


@pytest.mark.parametrize("path", ["..", ".", "", "/etc", "../../etc/passwd", "a/../../..", "x\0y", "link"])
def test_no_path_leads_out_of_the_folder(running: Running, path: str, tmp_path: Path) -> None:
    link = Path(str(running.server.state.settings.lora_folder)) / "link"
    shutil.copytree(Path(str(running.server.state.settings.lora_folder)) / "b", tmp_path / "b")
    link.symlink_to(tmp_path / "b")
    try:
        status, answer = post(running, "load", lora_name="evil", lora_path=path)
    finally:
        link.unlink()
    assert status == 400 and "lora_path" in answer["error"]["message"], answer
    assert str(tmp_path) not in answer["error"]["message"]
    assert [model.id for model in running.client.models.list()] == [MODEL, "a"]


def test_refusals(running: Running) -> None:
    status, answer = post(running, "load", lora_name=MODEL, lora_path="b")
    assert status == 400 and "is the name of the model itself" in answer["error"]["message"]
    status, answer = post(running, "load", lora_name="c", lora_path="nothing")
    assert status == 400 and "there is no adapter_config.json" in answer["error"]["message"]
    assert post(running, "load", lora_name="c")[0] == 400


def test_off_unless_the_server_allows_it(adapters: Adapters) -> None:
    with serving() as server:
        assert post(server, "load", lora_name="b", lora_path=adapters.folders["b"])[0] == 404
        assert post(server, "unload", lora_name="b")[0] == 404
    with pytest.raises(ValueError, match="lora_folder is '/nowhere', which is not a folder"), serving(lora_folder="/nowhere"):
        pass
