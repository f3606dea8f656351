"""`paged-attn serve` as a process: its start, its end, its errors, and load from many clients."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from paged_attn import LLM, SamplingParams
from paged_attn.cli import serve
from paged_attn.cli.main import build_parser, main
from tests.cli.ready import url_when_ready


@contextmanager
def process(folder: Path, *flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is ready, and its address."""
    command = [sys.executable, "-m", "paged_attn.cli.main", "serve", "--model", str(folder), "--port", "0", "--num-pages", "64", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}) as server:
        try:
            yield server, url_when_ready(server)
        finally:
            server.kill()


@pytest.mark.slow
def test_a_process_serves_many_clients_and_ends_with_status_0(model_folder: Path) -> None:
    prompts = [f"Prompt {'x' * (i % 7)} of client {i}" for i in range(40)]
    want = [c.token_ids for c in LLM(model_folder, num_pages=64).generate(prompts, SamplingParams(max_new_tokens=10))]
    with process(model_folder, "--drain-seconds", "60", PAGED_ATTN_API_KEY="k") as (server, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:

            def ids(prompt: str) -> list[int]:
                settings: dict[str, Any] = {"model": model_folder.name, "max_tokens": 10, "temperature": 0, "stream": True}
                stream = client.completions.create(prompt=prompt, extra_body={"return_token_ids": True}, **settings)
                return [token for chunk in stream for token in chunk.choices[0].token_ids]

            with ThreadPoolExecutor(16) as pool:
                assert list(pool.map(ids, prompts)) == want
            with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as stranger:
                stranger.models.list()
            settings = {"model": model_folder.name, "max_tokens": 40, "stream": True, "extra_body": {"ignore_eos": True}}
            stream: Any = client.completions.create(prompt="The end", **settings)
            parts = iter(stream)
            next(parts)
            server.send_signal(signal.SIGTERM)
            assert [part.choices[0].finish_reason for part in parts][-1] == "length"
        assert server.wait(60) == 0
        assert server.stderr is not None and server.stderr.read() == ""


def test_a_model_that_is_not_there_is_an_error_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "paged-attn: error: no model at" in capsys.readouterr().err


def test_a_port_in_use_is_found_before_the_model_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(tmp_path), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"can not listen on 127.0.0.1 port {port}" in error and "loading" not in error


def test_what_is_not_installed_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "NEEDED", (*serve.NEEDED, "no_such_package"))
    assert main(["serve", "--model", "x"]) == 2
    assert "needs no_such_package; install the extra: pip install 'paged-attn[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--max-queue", "-1"], "max_queue is -1"),
        (["--page-size", "0"], "page_size is 0"),
        (["--api-key", ""], "API key is empty"),
    ],
)
def test_settings_out_of_range_are_errors_of_the_user(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "x", *flags]) == 2
    assert words in capsys.readouterr().err


def test_the_models_name_is_the_hub_id_or_the_folders(tmp_path: Path) -> None:
    assert serve.model_name("org/name") == "org/name"
    (tmp_path / "mine").mkdir()
    assert serve.model_name(f"{tmp_path}/mine/") == "mine"


def test_every_engine_setting_is_a_flag_of_serve() -> None:
    args = build_parser().parse_args(["serve", "--model", "x", "--max-requests", "3", "--no-prefix-cache"])
    assert (args.engine_max_requests, args.engine_prefix_cache) == ("3", "off")
