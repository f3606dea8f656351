"""The house rules of DESIGN.md section 1: what imports what, what an import costs, how long files are."""

import ast
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("attn_ops", "passes", "capture", "backends")
HOUSE = ("paged_attn", *FOLDERS)
# What each folder may import of ours, itself apart: paged_attn -> passes, capture -> attn_ops <- backends.
MAY_IMPORT = {"attn_ops": set(), "backends": {"attn_ops"}, "passes": {"attn_ops"}, "capture": {"attn_ops"}}
HEAVY = ("transformers", "triton", "flashinfer", "sgl_kernel", "flash_attn", "torch._dynamo", "torch._inductor", "matplotlib", "fastapi")
MAX_LINES = 500


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.is_file())


def everything() -> list[Path]:
    return sources(*HOUSE, "tests", "benchmarks", "examples")


def imported(source: str, package: str = "") -> set[str]:
    """Full names of the modules that the source imports, at the top or in a function; `package` resolves relative imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def part_of_house(name: str) -> str | None:
    """`passes` for paged_attn.passes.runner, `paged_attn` for the public face, None for what is not ours."""
    head, *rest = name.split(".")
    if head != "paged_attn":
        return None
    return rest[0] if rest and rest[0] in FOLDERS else "paged_attn"


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parent.parts
    return ".".join(parts if parts[0] == "paged_attn" else ("paged_attn", *parts))


def test_the_import_reader_reads_every_form():
    lines = ["import paged_attn.passes.a", "from paged_attn import backends", "def f():", "  from paged_attn.capture.b import c"]
    source = "\n".join([*lines, "from . import d", "from ..x import e"])
    names = imported(source, "paged_attn.attn_ops")
    assert names == {"paged_attn.passes.a", "paged_attn.backends", "paged_attn.capture.b.c", "paged_attn.attn_ops.d", "paged_attn.x.e"}
    assert [part_of_house(n) for n in sorted(names)] == ["attn_ops", "backends", "capture", "passes", "paged_attn"]
    assert part_of_house("torch.nn") is None


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_one_way(folder):
    found = sources(folder)
    assert len(found) > 1
    for path in found:
        ours = {name: part_of_house(name) for name in imported(path.read_text(), package_of(path))}
        wrong = sorted(name for name, part in ours.items() if part is not None and part not in MAY_IMPORT[folder] | {folder})
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}; {folder} may import {sorted(MAY_IMPORT[folder])} of ours"


def test_no_folder_is_imported_without_the_prefix():
    for path in everything():
        wrong = sorted(name for name in imported(path.read_text(), package_of(path)) if name.split(".")[0] in FOLDERS)
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}; write paged_attn.{wrong[0]}"


def test_no_file_is_too_long():
    long = {str(path.relative_to(ROOT)): n for path in everything() if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines: {long}"


def python(code: str) -> dict:
    """What a fresh interpreter prints as JSON; it starts away from the root, as a user's does."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COV_CORE_SOURCE")}
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=elsewhere, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_folders_are_importable_once():
    got = python(
        "import importlib.util, json, paged_attn.attn_ops.op\n"
        f"print(json.dumps([name for name in {FOLDERS!r} if importlib.util.find_spec(name)]))"
    )
    assert got == []


def test_attn_ops_loads_no_kernel_no_pass_no_backend():
    modules = [f"paged_attn.attn_ops.{path.stem}" for path in sources("attn_ops")]
    assert "paged_attn.attn_ops.op" in modules
    loaded = python(
        f"import importlib, json, sys\nfor m in {modules!r}: importlib.import_module(m)\nprint(json.dumps(sorted(sys.modules)))"
    )
    assert set(modules) - {"paged_attn.attn_ops.__init__"} <= set(loaded)
    assert [m for m in loaded if m.startswith("paged_attn") and not m.startswith("paged_attn.attn_ops")] == ["paged_attn"]
    assert not {m.split(".")[0] for m in loaded} & {"triton", "flashinfer", "sgl_kernel", "flash_attn", "transformers"}


def test_importing_paged_attn_is_light():
    """Beyond what torch itself loads: nothing heavy, and less than a second. The best of three, since the machine may be busy."""
    code = (
        "import json, sys, time\n"
        "import torch\n"
        "before, start = set(sys.modules), time.perf_counter()\n"
        "import paged_attn\n"
        "spent = time.perf_counter() - start\n"
        "print(json.dumps({'seconds': spent, 'new': sorted(set(sys.modules) - before)}))"
    )
    runs = [python(code)]
    while min(run["seconds"] for run in runs) >= 1.0 and len(runs) < 3:
        runs.append(python(code))
    assert "paged_attn" in runs[0]["new"]
    heavy = [m for m in runs[0]["new"] if any(m == h or m.startswith(h + ".") for h in HEAVY)]
    assert not heavy
    assert min(run["seconds"] for run in runs) < 1.0


def test_the_public_names_are_light_too():
    """`paged_attn.KVPool` and friends load no torch._dynamo; importing torch itself may."""
    code = (
        "import json, sys\nimport torch\nbefore = set(sys.modules)\nimport paged_attn\n"
        "[getattr(paged_attn, n) for n in ('AttentionSpec', 'Batch', 'KVPool', 'PageAllocator', 'RadixCache', 'forward_context')]\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    heavy = [m for m in python(code) if any(m == h or m.startswith(h + ".") for h in HEAVY)]
    assert not heavy
