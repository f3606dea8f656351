"""`paged-attn chat` with a standard input of its own: several turns, Ctrl-C, templates, errors."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paged_attn import LLM, SamplingParams
from paged_attn.cli.commands import chat
from paged_attn.cli.main import main
from paged_attn.engine.llm import LLM as Engine

TURNS = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


def talk(monkeypatch: pytest.MonkeyPatch, lines: str, folder: Path, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", "--model", str(folder), "--num-pages", "64", "--max-new-tokens", "6", "--no-compile", *flags])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What messages each answer was asked for with."""
    seen: list[Any] = []
    stream_chat = Engine.stream_chat

    def watched(self: LLM, messages: Any, *args: Any, **settings: Any) -> Any:
        seen.append([dict(message) if isinstance(message, dict) else message.as_dict() for message in messages])
        return stream_chat(self, messages, *args, **settings)

    monkeypatch.setattr(Engine, "stream_chat", watched)
    yield seen


def test_turns_hold_what_was_said_before(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[Any]
) -> None:
    assert talk(monkeypatch, "Hello\n\nAnd now?\n/new\nHello\n", model_folder, "--system", "Be kind", "--chat-template", TURNS) == 0
    with LLM(model_folder, num_pages=64, compile=False) as llm:
        (first,) = llm.chat(asked[0], SamplingParams(max_new_tokens=6), chat_template=TURNS)
    system, hello = {"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}
    answer = {"role": "assistant", "content": first.text}
    assert asked == [[system, hello], [system, hello, answer, {"role": "user", "content": "And now?"}], [system, hello]]
    out, err = capsys.readouterr()
    assert out.startswith(first.text + "\n") and out.endswith(first.text + "\n") and "Ctrl-C stops an answer" in err


def test_ctrl_c_stops_an_answer_and_not_the_conversation(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[Any]
) -> None:
    stream_chat = Engine.stream_chat

    def pressed(self: LLM, *args: Any, **settings: Any) -> Any:
        def events() -> Iterator[Any]:
            for number, event in enumerate(inner):
                if number == 2 and len(asked) == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                yield event

        inner = stream_chat(self, *args, **settings)
        return events()

    monkeypatch.setattr(Engine, "stream_chat", pressed)
    before = signal.getsignal(signal.SIGINT)
    assert talk(monkeypatch, "Hello\nGo on\n", model_folder, "--max-new-tokens", "64", "--ignore-eos") == 0
    assert signal.getsignal(signal.SIGINT) is before and threading.active_count() < 50
    first, second, *_ = capsys.readouterr().out.split(" [stopped]\n")
    assert asked[1][1] == {"role": "assistant", "content": first} and len(second) > len(first)


def test_a_message_that_is_refused_was_never_said(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[Any]
) -> None:
    assert talk(monkeypatch, "x" * 5000 + "\nHi\n", model_folder) == 0
    assert asked[1] == [{"role": "user", "content": "Hi"}]
    assert "paged-attn: error: the prompt is too long" in capsys.readouterr().err


def test_what_looks_like_a_command_is_not_said(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[Any]
) -> None:
    assert talk(monkeypatch, "/help\n/nwe\n /nwe\n/new\n/ is a slash\n", model_folder) == 0
    assert [messages[-1]["content"] for messages in asked] == [" /nwe", "/ is a slash"] and len(asked[1]) == 1
    err = capsys.readouterr().err
    assert "there is no /help; /new begins a new conversation, Ctrl-D ends" in err and "there is no /nwe;" in err
    assert "\na new conversation\n" in err


def test_lines_are_edited_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "readline", raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: prompt + str("readline" in sys.modules))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert chat._read_line() == f"> {importlib.util.find_spec('readline') is not None}"


def test_a_tokenizer_of_its_own(model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: list[Any]) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_folder / name, tmp_path)
    assert talk(monkeypatch, "Hi\n", tmp_path, "--tokenizer", str(model_folder), "--chat-template", TURNS) == 0
    assert len(asked) == 1


def test_ctrl_c_at_the_prompt_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([KeyboardInterrupt(), "Hello"])

    def fake(prompt: str) -> str:
        if isinstance(given := next(answers), BaseException):
            raise given
        return given

    monkeypatch.setattr("builtins.input", fake)
    assert chat._read_line() == "Hello"


def test_a_template_that_can_not_be_read(model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(monkeypatch, "", model_folder, "--chat-template", "/nothing") == 2
    assert "give a file, or a Jinja template" in capsys.readouterr().err
