"""`paged-attn serve` as a process: its start, its end, its errors, and load from many clients."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from paged_attn import LLM, SamplingParams
from paged_attn.attn_ops.install_line import install_line
from paged_attn.cli.commands import serve
from paged_attn.cli.main import build_parser, main
from paged_attn.cli.serve_options import LIMITS, server_settings
from paged_attn.server.settings import ServerSettings
from tests.cli.ready import url_when_ready
from tests.timings import assert_in_time


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
    with process(model_folder, "--drain-seconds", "60", "--no-log-requests", PAGED_ATTN_API_KEY="k") as (server, url):
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
            stream: Any = client.completions.create(prompt=["The end"] * 40, **settings)  # seconds: none may be done before the signal
            parts = iter(stream)
            next(parts)
            server.send_signal(signal.SIGTERM)
            ends = [reason for part in parts for choice in part.choices if (reason := choice.finish_reason)]
            assert ends == ["length"] * 40
        assert server.wait(60) == 0
        assert server.stderr is not None
        assert server.stderr.read() == "ending: 1 request may go on for 60 s, and nothing new is taken; Ctrl-C again ends at once\n"


def test_a_second_ctrl_c_ends_a_busy_server_at_once_and_leaves_no_traceback(model_folder: Path) -> None:
    with process(model_folder, "--no-log-requests") as (server, url):
        body = {"prompt": ["The end"] * 100, "max_tokens": 100, "stream": True, "ignore_eos": True}  # seconds
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()  # dropped, it would hang up
            assert next(lines).startswith("data: {")
            server.send_signal(signal.SIGINT)
            assert server.stderr is not None
            assert server.stderr.readline().startswith("ending: 1 request may go on for 30 s")
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 0
        assert server.stderr.read() == ""


@pytest.mark.parametrize(("model", "words"), [("/nope", "not a directory"), ("", "it has no config.json")])
def test_a_model_that_is_not_there_is_said_in_one_line_at_once(tmp_path: Path, model: str, words: str) -> None:
    """In a process of its own, with all that it imports."""
    model = model or str(tmp_path)
    command = [sys.executable, "-m", "paged_attn.cli.main", "serve", "--model", model, "--port", "0"]

    def served() -> tuple[float]:
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"paged-attn: error: no model at {model!r}: {words}. Give a directory with config.json")
        return (time.monotonic() - started,)

    assert_in_time(served, 5)


@pytest.mark.slow
def test_a_model_that_can_not_be_loaded_leaves_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 10}')
    assert main(["serve", "--model", str(tmp_path), "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "paged-attn: error: no causal language model could be loaded from" in error and "Traceback" not in error


def test_every_server_setting_has_its_flag_and_its_default() -> None:
    args = build_parser().parse_args(["serve", "--model", "x"])
    assert server_settings(args, "x") == ServerSettings("x", log_requests=True)
    limits = {limit.name for limit in LIMITS}
    names = {field.name for field in dataclasses.fields(ServerSettings)}
    others = {"model_name", "host", "port", "api_keys", "share_prefixes", "allow_priority", "allow_origins", "allow_hosts",
              "log_requests", "lora_folder", "otlp_endpoint", "tool_parser", "reasoning_parser",
              "uds", "ssl_certfile", "ssl_keyfile"}  # fmt: skip
    assert limits | others == names and not limits & others
    flags = ["--share-prefixes", "--allow-origin", "https://a", "--allow-origin", "https://b", "--allow-host", "*.c", "--no-log-requests"]
    flags += ["--queue-seconds", "3", "--max-connections", "5", "--otlp-endpoint", "http://x/v1/traces", "--api-key", "k"]
    got = server_settings(build_parser().parse_args(["serve", "--model", "x", *flags]), "x")
    assert got == ServerSettings(
        "x", share_prefixes=True, allow_origins=("https://a", "https://b"), allow_hosts=("*.c",), queue_seconds=3.0, max_connections=5,
        otlp_endpoint="http://x/v1/traces", api_keys=("k",),
    )  # fmt: skip


def test_a_port_in_use_is_found_before_the_model_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(tmp_path), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1 port {port}" in error and "loading" not in error


def test_what_is_not_installed_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "NEEDED", (*serve.NEEDED, "no_such_package"))
    assert main(["serve", "--model", "x"]) == 2
    assert f"needs no_such_package; install the extra: {install_line('serve')}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--max-queue", "-1"], "max_queue is -1; allowed are finite values of at least 0"),
        (["--request-seconds", "0"], "request_seconds is 0.0; allowed are finite values above 0"),
        (["--max-requests-per-key", "0"], "max_requests_per_key is 0; allowed are finite values of at least 1"),
        (["--max-body-mib", "300"], "max_bodies_mib is 256; allowed are values of at least twice max_body_mib (300), 600"),
        (["--max-connections", "100000000"], "this process may have"),
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


@pytest.mark.parametrize(
    "flags", [["--served-model-name", "a", "b"], ["--served-model-name", "a", "--port", "0", "--served-model-name", "b"]], ids=" ".join
)
def test_a_model_may_have_several_names(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser().parse_args(["serve", "model", *flags])
    settings = server_settings(args, "model")
    assert settings.names == ("a", "b") and settings.first_name == "a" and args.model == "model"
    assert main(["serve", "model", *flags, "--lora", "b=folder"]) == 2
    assert "--lora b=...: that is the name of the model itself" in capsys.readouterr().err


def test_every_engine_setting_is_a_flag_of_serve() -> None:
    args = build_parser().parse_args(["serve", "--model", "x", "--max-requests", "3", "--no-prefix-cache"])
    assert (args.engine_max_requests, args.engine_prefix_cache) == ("3", "off")
