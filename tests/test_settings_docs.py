"""docs/settings.md: its tables are those of the code, and no setting is missing."""

from __future__ import annotations

import argparse
import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from paged_attn import EngineConfig, SamplingParams
from paged_attn.cli.options import add_engine
from paged_attn.cli.serve_options import add_model_options, add_server_options, server_settings
from paged_attn.server.settings import ServerSettings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BASIC = {
    "page_size", "num_pages", "kv_memory_gib", "max_batch_tokens", "max_requests", "backend", "prefix_cache", "graphs", "deterministic",
    "threads", "compile", "disable_passes", "self_check", "generation_config",
}  # fmt: skip


def make_settings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_make_settings", DOCS / "make_settings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def rows(table: str) -> dict[str, list[str]]:
    """The cells of a Markdown table by the name in the first."""
    return {cells(line)[0].strip("`"): cells(line) for line in table.splitlines()[2:]}


def test_the_tables_are_those_of_the_code() -> None:
    script, text = make_settings(), (DOCS / "settings.md").read_text(encoding="utf-8")
    assert script.with_tables(text) == text, "run `make docs`"
    with pytest.raises(ValueError, match=r"settings\.md must hold <!-- engine --> and <!-- /engine --> once each"):
        script.with_tables("no marks")


def test_a_stale_page_is_seen() -> None:
    script, text = make_settings(), (DOCS / "settings.md").read_text(encoding="utf-8")
    for old in ("tokens per KV page", "keep the k most likely tokens", "largest body of a request"):
        assert script.with_tables(text.replace(old, "something else")) == text != text.replace(old, "something else")


def test_every_setting_is_there_once_with_flag_variable_and_default() -> None:
    script = make_settings()
    basic, advanced = rows(script.engine_markdown(False)), rows(script.engine_markdown(True))
    assert basic.keys() == BASIC and not basic.keys() & advanced.keys()
    assert basic.keys() | advanced.keys() == {setting.name for setting in fields(EngineConfig)}
    for name, (_, flag, variable, kind, default, meaning) in (basic | advanced).items():
        assert flag == f"`--{name.replace('_', '-')}`" and variable == f"`PAGED_ATTN_{name.upper()}`"
        assert kind and default and meaning and "default:" not in meaning, name
    assert basic["num_pages"][4:] == ["as many as fit kv_memory_gib", "pages in the KV pool, page 0 included, whatever kv_memory_gib is"]
    assert advanced["policy"][3:5] == ["`fcfs` or `lpm`", "`fcfs`"] and basic["page_size"][3:5] == ["`int`, at least 1", "`16`"]


def test_every_sampling_parameter_has_the_meaning_that_its_docstring_gives() -> None:
    made = rows(make_settings().sampling_markdown())
    assert list(made) == [setting.name for setting in fields(SamplingParams)]
    assert made["top_k"] == ["`top_k`", "`--top-k`", "`int`", "`0`", made["top_k"][-1]] and all(row[-1] for row in made.values())
    assert made["logits_processors"][1] == "" and made["logits_processors"][-1].endswith("do not overlap while one is in use")


def test_every_setting_of_the_server_has_the_default_of_its_flag() -> None:
    made = rows(make_settings().server_markdown())
    assert list(made) == [setting.name for setting in fields(ServerSettings)]
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    add_model_options(parser)
    settings = server_settings(parser.parse_args([]), "any")
    for name, row in made.items():
        value = getattr(settings, name)
        assert row[4] == f"`{value}`" or (value is None and row[4] in ("no limit", "none")) or name == "model_name", row
    assert made["log_requests"][-1] == "a line of JSON on stdout for each request"


def test_every_variable_of_the_code_is_on_the_page() -> None:
    text, folders = (DOCS / "settings.md").read_text(encoding="utf-8"), ("paged_attn", "attn_ops", "passes", "capture", "backends")
    found = {name for folder in folders for path in (ROOT / folder).rglob("*.py") for name in variables(path.read_text(encoding="utf-8"))}
    assert {"PAGED_ATTN_CACHE", "PAGED_ATTN_TUNED", "PAGED_ATTN_DUMP", "PAGED_ATTN_API_KEY"} <= found
    assert not [name for name in sorted(found) if name not in text]


def variables(source: str) -> set[str]:
    return set(re.findall(r"PAGED_ATTN_[A-Z_]*[A-Z]", source)) - {"PAGED_ATTN_NAME"}


def test_help_has_two_groups() -> None:
    parser = argparse.ArgumentParser(prog="any")
    add_engine(parser)
    _, basic, advanced = re.split(r"^engine(?:, advanced)?:$", parser.format_help(), flags=re.MULTILINE)
    for setting in fields(EngineConfig):
        flag = re.compile(rf"^  --{setting.name.replace('_', '-')} ", re.MULTILINE)
        assert (bool(flag.search(basic)), bool(flag.search(advanced))) == (setting.name in BASIC, setting.name not in BASIC)
