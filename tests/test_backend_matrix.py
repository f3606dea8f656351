"""The support matrix and the table of optional packages."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from paged_attn.backends.attention.capabilities import Capabilities, Feature, GraphSupport, OneOf, Span
from paged_attn.backends.devices import devices_here
from paged_attn.backends.needs import Requirement
from paged_attn.backends.selection.ranking import ROWS
from paged_attn.backends.selection.registry import backend_class, backend_names
from paged_attn.report import backend_matrix
from paged_attn.report.backend_matrix import (
    HEADERS,
    attention_row,
    attention_rows,
    available_here,
    experts_rows,
    markdown_table,
    matrix_markdown,
    matrix_text,
    rows_markdown,
    scans_rows,
    text_table,
)

SCANS = "<!-- scans -->\n<!-- /scans -->\n"
EXPERTS = "<!-- experts -->\n<!-- /experts -->\n"
DOCS = Path(__file__).parents[1] / "docs"
FAST = Capabilities(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16}),
    kv_dtypes=frozenset({torch.float8_e4m3fn}),
    features=frozenset({Feature.FP8_KV, Feature.WINDOW}),
    architectures=frozenset({90, 80}),
    page_sizes=Span(16, 64, 16),
    graphs={"decode": GraphSupport.ALWAYS},
    requirements=(Requirement("no_such_package", "2.0", "pip install no-such-package"),),
)


def test_every_backend_has_a_row_that_states_all_its_capabilities() -> None:
    rows = {row["Backend"]: row for row in attention_rows()}
    assert list(rows) == backend_names()
    for name, row in rows.items():
        assert tuple(row) == HEADERS
        for feature in backend_class(name).capabilities.features:
            assert feature.name.lower().replace("_", "-") in row["Features"].split("; ")[0].split(", ")
    assert "not chunk with window" in rows["fa3"]["Features"]
    assert "backend='fa3,flashinfer'" in matrix_text()
    assert "torch_native" in matrix_text() and "torch_native" in matrix_markdown()
    assert rows["torch_native"]["Here"].startswith("yes: cpu")


def test_a_row_in_words() -> None:
    row = attention_row("fast", FAST)
    expected = {
        "Devices": "cuda (SM80, SM90)", "KV dtypes": "float8_e4m3fn", "Page sizes": "16 to 64 in steps of 16", "Head dims": "any",
        "Features": "fp8-kv, window", "Graphs": "decode: always", "Needs": "no_such_package 2.0", "Phases": "both", "Note": "",
    }  # fmt: skip
    assert row | expected == row
    pairs = dataclasses.replace(FAST, head_dims=OneOf({64, 128}), dim_pairs=frozenset({(192, 128)}), phases=frozenset({"decode"}), note="a")
    row = attention_row("fast", pairs)
    assert row | {"Head dims": "64, 128, 192/128", "Phases": "decode only", "Note": "a"} == row


def test_what_is_missing_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = ", ".join(devices_here())
    assert available_here(FAST) == f"no: runs on cuda; this machine has {here}; no_such_package 2.0 is not installed"
    anywhere = dataclasses.replace(FAST, devices=frozenset({"cpu", "cuda"}), requirements=())
    assert available_here(anywhere).startswith("yes: cpu")


def test_an_older_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "no: no GPU with SM80, SM90; found SM75; no_such_package" in available_here(FAST)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert available_here(dataclasses.replace(FAST, requirements=())) == "yes: cuda"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert available_here(FAST).startswith("no: runs on cuda; this machine has cpu") and "hip" in available_here(FAST)


def test_tables_fit_their_width_and_escape_pipes() -> None:
    table = text_table(("Name", "Words"), [("a", "one two three four"), ("b", "")], width=16)
    assert table.split("\n") == ["Name  Words", "----  ----------", "a     one two", "      three four", "b"]
    assert markdown_table(("A",), [("x|y",)]) == "| A |\n| --- |\n| x\\|y |"


def test_install_lines_are_whole_below_tables_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"pip install '/{'long' * 30}/paged_attn[fast]'"
    lacking = SimpleNamespace(capabilities=dataclasses.replace(FAST, requirements=(Requirement("no_such_package", "2.0", line),)))
    monkeypatch.setattr(backend_matrix, "backend_names", lambda: ["fast", "faster"])
    monkeypatch.setattr(backend_matrix, "backend_class", lambda name: lacking)
    monkeypatch.setattr(backend_matrix, "loadable_classes", lambda: dict.fromkeys(["fast", "faster"], lacking))
    monkeypatch.setattr(backend_matrix, "SCANS", {})
    tables, install = matrix_text(90).split("To install:\n")
    assert max(map(len, tables.split("\n"))) <= 90
    assert install == f"  fast, faster: {line}"
    monkeypatch.undo()
    assert max(map(len, matrix_text(90).split("To install:")[0].split("\n"))) <= 90


def test_a_module_that_can_not_be_imported_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        raise ImportError("no module acme")

    monkeypatch.setattr(backend_matrix, "backend_names", lambda: ["acme"])
    monkeypatch.setattr(backend_matrix, "backend_class", load)
    (row,) = attention_rows()
    assert (row["Backend"], row["Here"], row["Devices"]) == ("acme", "no: its module cannot be imported: no module acme", "")
    assert "acme" in matrix_text() and "| acme |" in matrix_markdown()


def test_the_documentation_holds_the_tables_as_they_are() -> None:
    text = (DOCS / "backends.md").read_text(encoding="utf-8")
    assert "`make docs`" in text
    for row in ROWS:
        for names in filter(None, (row.names, row.decode, row.latents, row.latents_decode)):
            assert row.device == "hip" or f" {', '.join(names)}" in text, f"run `make docs`: {row}"
    assert matrix_markdown() in text, "run `make docs`"
    assert make_backends().with_tables(text) == text, "run `make docs`"


def test_make_docs_writes_over_old_tables_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = make_backends()
    headers = "| device | order | order for models that keep latents |\n| --- | --- | --- |"
    old = f"One\n<!-- orders -->\nOUTDATED\n<!-- /orders -->\ntwo\n<!-- matrix -->\n<!-- /matrix -->\nthree\n{EXPERTS}{SCANS}"
    monkeypatch.setattr(script, "PAGE", tmp_path / "backends.md")
    script.PAGE.write_text(old)
    for _ in range(2):
        script.main()
        text = script.PAGE.read_text()
        assert text.startswith(f"One\n<!-- orders -->\n\n{headers}\n| Hopper (SM90) | fa3, ")
        assert "OUTDATED" not in text
        assert f"\ntwo\n<!-- matrix -->\n\n{matrix_markdown()}\n\n<!-- /matrix -->\nthree\n" in text
        experts, scans = rows_markdown(experts_rows()), rows_markdown(scans_rows())
        assert text.endswith(f"\n\n{experts}\n\n<!-- /experts -->\n<!-- scans -->\n\n{scans}\n\n<!-- /scans -->\n")
    with pytest.raises(ValueError, match="must hold <!-- orders --> and <!-- /orders --> once each"):
        script.with_tables("no marks")


def make_backends() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_make_backends", DOCS / "make_backends.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
