"""Writes the tables of docs/settings.md from the code, each between its marks: `make docs`."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from docs import marked_tables
from paged_attn.cli.options import add_engine, add_run_options
from paged_attn.cli.serve_options import API_KEY_VARIABLE, add_model_options, add_server_options
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.sampling_params import SamplingParams
from paged_attn.report.backend_matrix import markdown_table
from paged_attn.server.settings import ServerSettings

PAGE = Path(__file__).with_name("settings.md")
DEFAULT = re.compile(r"(?:;| \() ?default: (.*?)\)?$")  # of a help text, at its end
FLAGS_OF_THE_SERVER = {  # where a flag is called otherwise than what it sets
    "model_name": "served_model_name",
    "api_keys": "api_key",
    "allow_origins": "allow_origin",
    "allow_hosts": "allow_host",
    "log_requests": "no_log_requests",
}


def engine_markdown(advanced: bool) -> str:
    """The settings of an engine that many people need, or those that few do."""
    flags = _actions(add_engine)
    rows = []
    for setting in fields(EngineConfig):
        if setting.metadata["advanced"] is advanced:
            what, default = _split(setting.metadata["help"])
            flag = flags[f"engine_{setting.name}"]
            shown = default if setting.default is None else _code(setting.default)
            rows.append((f"`{setting.name}`", _flag(flag), f"`PAGED_ATTN_{setting.name.upper()}`", _allowed(setting), shown, what))
    return markdown_table(("name", "flag", "environment variable", "type", "default", "meaning"), rows)


def sampling_markdown() -> str:
    flags, meanings = _actions(lambda parser: add_run_options(parser, dtype="auto")), attributes(SamplingParams)
    rows = [
        (f"`{p.name}`", _flag(flags[p.name]) if p.name in flags else "", f"`{p.type}`", _code(p.default), meanings[p.name])
        for p in fields(SamplingParams)
    ]
    return markdown_table(("name", "flag", "type", "default", "meaning"), rows)


def server_markdown() -> str:
    """The defaults are those of the flags."""
    flags, rows = _actions(add_server_options) | _actions(add_model_options), []
    for setting in fields(ServerSettings):
        flag = flags[FLAGS_OF_THE_SERVER.get(setting.name, setting.name)]
        what, words = _split((flag.help or "") % vars(flag))
        turns_off = flag.dest.startswith("no_")
        default = not flag.default if turns_off else tuple(flag.default) if isinstance(flag.default, list) else flag.default
        shown = words or "none" if default is None else _code(default)
        variable = f"`{API_KEY_VARIABLE}`" if setting.name == "api_keys" else ""
        what = re.sub("^no ", "a ", what) if turns_off else what
        rows.append((f"`{setting.name}`", _flag(flag), variable, f"`{setting.type}`", shown, what))
    return markdown_table(("name", "flag", "environment variable", "type", "default", "meaning"), rows)


def attributes(cls: type) -> dict[str, str]:
    """The texts of a docstring's section `Attributes`, by name."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".") for name, text in entries}


def with_tables(text: str) -> str:
    """The page with its tables as the code has them now; ValueError without their marks."""
    made = {"engine": engine_markdown(False), "advanced": engine_markdown(True)}
    return marked_tables.with_tables(text, made | {"sampling": sampling_markdown(), "server": server_markdown()}, "docs/settings.md")


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def _actions(add: Callable[[argparse.ArgumentParser], None]) -> dict[str, argparse.Action]:
    """The flags that `add` adds, the first of each destination."""
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    return {action.dest: action for action in reversed(parser._actions)}


def _flag(action: argparse.Action) -> str:
    return f"`{action.option_strings[-1]}`"


def _split(help: str) -> tuple[str, str]:
    """What a help text says of the setting, and of its default."""
    found = DEFAULT.search(help)
    return (help[: found.start()], found[1]) if found else (help, "")


def _allowed(setting: Field[Any]) -> str:
    if choices := setting.metadata["choices"]:
        return ", ".join(map(_code, choices[:-1])) + f" or {_code(choices[-1])}"
    low = setting.metadata["low"]
    return f"`{setting.type}`" + (f", at least {low}" if low is not None else "")


def _code(value: object) -> str:
    return f"`{value}`"


if __name__ == "__main__":
    main()
