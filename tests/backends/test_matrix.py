"""The support matrix and the table of optional packages."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import torch

from paged_attn.backends.capabilities import Capabilities, Feature, GraphSupport, Requirement, Span
from paged_attn.backends.matrix import HEADERS, MatrixRow, available_here, matrix_markdown, matrix_rows, matrix_text
from paged_attn.backends.packages import PACKAGES, OptionalPackage
from paged_attn.backends.registry import backend_class, backend_names
from paged_attn.backends.table import markdown_table, text_table

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
    rows = matrix_rows()
    assert [row.backend for row in rows] == backend_names()
    for row in rows:
        assert len(row.cells) == len(HEADERS)
        for feature in backend_class(row.backend).capabilities.features:
            assert feature.name.lower().replace("_", "-") in row.features.split(", ")
    assert "torch_native" in matrix_text() and "torch_native" in matrix_markdown()
    assert next(row.here for row in rows if row.backend == "torch_native").startswith("yes: cpu")


def test_a_row_in_words() -> None:
    row = MatrixRow.of("fast", FAST)
    assert (row.devices, row.kv_dtypes, row.page_sizes, row.head_dims) == (
        "cuda (SM80, SM90)",
        "float8_e4m3fn",
        "16 to 64 in steps of 16",
        "any",
    )
    assert (row.features, row.graphs, row.needs) == ("fp8-kv, window", "decode: always", "no_such_package 2.0")


def test_what_is_missing_here_is_said_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available_here(FAST) == ("no: needs no_such_package 2.0: pip install no-such-package; runs on cuda; this machine has cpu")


def test_an_older_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert available_here(FAST).endswith("no GPU with SM80, SM90; found SM75")


def test_tables_fit_their_width_and_escape_pipes() -> None:
    table = text_table(("Name", "Words"), [("a", "one two three four"), ("b", "")], width=16)
    assert table.split("\n") == ["Name  Words", "----  ----------", "a     one two", "      three four", "b"]
    assert markdown_table(("A",), [("x|y",)]) == "| A |\n| --- |\n| x\\|y |"
    assert max(map(len, matrix_text(90).split("\n"))) <= 90


def test_packages_are_looked_up_without_importing_them() -> None:
    before = set(sys.modules)
    versions = {package.module: package.version for package in PACKAGES}
    assert set(versions) >= {"triton", "flashinfer", "sgl_kernel", "flash_attn", "matplotlib", "fastapi", "uvicorn"}
    assert not {package.module for package in PACKAGES} & (set(sys.modules) - before)
    assert OptionalPackage("pytest", ("no-such-name", "pytest"), "", "").version == pytest.__version__
    assert OptionalPackage("paged_attn", ("no-such-name",), "", "").version == "unknown"
    assert OptionalPackage("no_such_module", ("pytest",), "", "").version is None


def test_install_lines_name_extras_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for package in PACKAGES:
        if "[" in package.install:
            extra = package.install.partition("[")[2].partition("]")[0]
            names = [line.partition(">")[0] for line in project["optional-dependencies"][extra]]
            assert set(names) & set(package.distributions), package
