"""Before there is a release no message and no page sends anybody to an index for an extra of ours; the line that is told works."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from paged_attn.attn_ops import install_line as module
from paged_attn.attn_ops.install_line import install_line
from paged_attn.backends.selection.packages import PACKAGES

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_says_that_an_index_has_it() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    told = {  # results of benchmarks hold what was said when they were made
        name for name in files
        if name.endswith((".py", ".md", "Makefile")) and re.search(r"pip install [^\n]{0,40}paged-attn(?!\.)", (ROOT / name).read_text())
    }  # fmt: skip
    assert told <= {"tests/habits/test_install.py"}


def test_in_a_checkout_it_is_the_checkout() -> None:
    assert install_line("serve") == f"pip install -e '{ROOT}[serve]'"
    assert {line for package in PACKAGES if "[" in (line := package.install)} >= {install_line("serve"), install_line("sgl")}


class Installed:
    """What pip keeps of an installation: where it took it from, and what it needs."""

    requires = ('torch<3', 'fastapi>=0.115; extra == "serve"', 'paged-attn[structured]; extra == "serve"',
                'llguidance>=1.0; extra == "structured"')  # fmt: skip

    def __init__(self, origin: dict[str, Any] | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


def line_of(origin: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "_is_checkout", lambda root: False)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(origin))
    return install_line.__wrapped__("serve")


def test_elsewhere_it_is_where_this_installation_came_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "paged_attn-0.1.0-py3-none-any.whl"
    wheel.touch()
    lines = {
        "folder": line_of({"url": tmp_path.as_uri(), "dir_info": {}}, monkeypatch),
        "wheel": line_of({"url": wheel.as_uri(), "archive_info": {}}, monkeypatch),
        "git": line_of({"url": "https://h/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}, monkeypatch),
    }
    assert lines == {
        "folder": f"pip install '{tmp_path}[serve]'",
        "wheel": f"pip install 'paged-attn[serve] @ {wheel.as_uri()}'",
        "git": "pip install 'paged-attn[serve] @ git+https://h/r.git@abc'",
    }
    for kind in ("wheel", "git"):
        assert Requirement(lines[kind].removeprefix("pip install ").strip("'")).extras == {"serve"}


@pytest.mark.parametrize("origin", [None, {"url": "file:///gone/paged_attn.whl", "archive_info": {}}])
def test_where_that_is_not_known_or_gone_it_is_what_the_extra_holds(origin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert line_of(origin, monkeypatch) == "pip install 'fastapi>=0.115' 'llguidance>=1.0'"


def test_not_installed_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module, "_is_checkout", lambda root: False)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert install_line.__wrapped__("serve") == "pip install '.[serve]' in a checkout of paged-attn"


def test_make_shows_what_pip_does_and_how_long_it_took() -> None:
    recipe = subprocess.run(
        ["make", "-n", "-W", "pyproject.toml", ".venv/.base", "VENV=.venv"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert "pip install" in recipe and "--quiet" not in recipe and "took" in recipe
