"""The switches that docs/troubleshooting.md lists for finding which part gives wrong tokens: all of them work, and give the same tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paged_attn.cli.main import main
from paged_attn.passes.optional import OPTIONAL
from tests.test_layout import ROOT

SECTION = re.compile(r"## Wrong tokens\n.*?\n## ", re.DOTALL)


def switches() -> list[str]:
    """The flags of the table's rows, and of those named beside them."""
    (section,) = SECTION.findall((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [flag for row in rows for flag in re.findall(r"`(--[^`]+)`", row)]


def test_the_table_has_a_switch_for_each_part() -> None:
    found = {flag.split()[0] for flag in switches()}
    assert {"--graphs", "--overlap", "--prefix-cache", "--backend", "--disable-passes", "--compile", "--scans-backend"} <= found


@pytest.mark.parametrize("compiled", [True, False], ids=["rewritten", "hooked"])
def test_every_switch_works_and_tokens_stay_the_same(model_folder: Path, capsys: pytest.CaptureFixture[str], compiled: bool) -> None:
    passes = ",".join(each for each in OPTIONAL if each not in ("experts", "scans"))  # without these no name of a backend is read
    flags = [flag.replace("NAME,NAME", passes) for flag in switches() if compiled != flag.startswith("--compile")]
    given = [part for flag in flags for part in flag.split()]
    shape = ["--max-new-tokens", "6", "--num-pages", "64", "--dtype", "float32", "--check"]
    assert main(["generate", "--model", str(model_folder), "--prompt", "one", "--prompt", "a longer prompt", *shape, *given]) == 0
    assert "check passed: all 12 new tokens equal" in capsys.readouterr().err
