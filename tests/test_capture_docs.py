"""docs/capture_figures.md: its tables are those of the figures in benchmarks/results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def make_capture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_make_capture", DOCS / "make_capture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_figures() -> None:
    script, text = make_capture(), (DOCS / "capture_figures.md").read_text(encoding="utf-8")
    data, startup = script.read("capture.json"), script.read("capture_startup.json")
    assert script.with_tables(text, data, startup) == text, "run `make docs`"
    with pytest.raises(ValueError, match="must hold <!-- report --> and <!-- /report --> once each"):
        script.with_tables("no marks", data, startup)


def test_every_kernel_of_a_step_is_counted_once() -> None:
    script = make_capture()
    for mode, found in script.read("capture.json")["modes"].items():
        for step in found["decode"].values():
            if "kernels_ms" in step:
                kinds = script._by_kind(step)
                assert sum(us for us, _ in kinds.values()) == pytest.approx(step["kernels_ms"] * 1e3), mode
                assert kinds["matrix products"][0] > 0 and kinds["attention, with the KV write"][0] > 0


def test_other_figures_give_other_tables_and_verdicts() -> None:
    script = make_capture()
    data, startup = script.read("capture.json"), script.read("capture_startup.json")
    changed = json.loads(json.dumps(data))
    first = next(iter(changed["modes"][script.BEST]["decode"]))
    step = changed["modes"][script.BEST]["decode"][first]
    for factor, verdict in ((1.05, "| yes |"), (1.2, "| no |")):
        step["ms"] = step["floor_ms"] * factor
        assert script.goals(changed, startup).splitlines()[2].endswith(f"{factor - 1:.0%} above {verdict}")
    assert script.decode(changed, startup) != script.decode(data, startup)
