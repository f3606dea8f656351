"""The house rules of docs/design/rooms.md: what imports what, what an import costs, how long files are."""

import ast
import json
import os
import re
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
# A sign need not name each of its files if they are named after what they do.
FILE_BY_NAME = re.compile(
    r"the (file|folder) of its\s+(name|kind)|[oO]ne file (each|per)|one file or folder each|its file, and|its file, with|rooms of DESIGN"
)
WITHOUT_SIGN = ("paged_attn.demo_model",)  # data


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


def modules() -> dict[str, Path]:
    """Full names of our modules and packages, and their files."""
    found = {}
    for path in sources(*HOUSE):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "paged_attn" else ("paged_attn", *parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of_ours() -> dict[str, set[str]]:
    known, edges = modules(), {}
    for name, path in known.items():
        ours = (n if n in known else n.rpartition(".")[0] for n in imported(path.read_text(), package_of(path)))
        edges[name] = {n for n in ours if n in known and n not in ("paged_attn", name)}
    return edges


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other, after Tarjan."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return found


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circles(imports_of_ours()) == []


def test_rooms_import_one_way():
    """A room is a folder. What lies beside rooms in a folder counts for itself: some of it is their base, some their face."""
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    with_rooms = {name.rpartition(".")[0] for name in packages}

    def room(name: str) -> str:
        return name if name in packages or name.rpartition(".")[0] in with_rooms else name.rpartition(".")[0]

    edges: dict[str, set[str]] = {}
    for name, others in imports_of_ours().items():
        edges.setdefault(room(name), set()).update(room(other) for other in others if room(other) != room(name))
    assert circles(edges) == []


def test_a_room_has_a_sign_and_a_dozen_files_at_most():
    for name, path in modules().items():
        if path.name == "__init__.py":
            sign = ast.get_docstring(ast.parse(path.read_text())) or ""
            lacks = [word for word in ("In:", "Out:", "Change:") if word not in sign and name not in WITHOUT_SIGN]
            assert not lacks, f"the sign of {name} lacks {lacks}: say what comes in, what goes out, and where to change what"
            named = re.findall(r"`([\w./]+(?:\.py|/))`", sign)
            gone = [each for each in named if not any((at / each).exists() for at in (path.parent, ROOT))]
            assert not gone, f"the sign of {name} names {gone}, which do not exist"
            unnamed = [each for each in parts_of(path.parent) if not re.search(rf"(?<!\w){re.escape(each)}", sign)]
            say_all = not unnamed or name in WITHOUT_SIGN or FILE_BY_NAME.search(sign)
            assert say_all, f"the sign of {name} does not say what {unnamed} are for"
            files = [file.name for file in path.parent.glob("*.py") if file != path]
            assert len(files) <= 12, f"{name} has {len(files)} files; make rooms of them by what they do: {sorted(files)}"


def parts_of(room: Path) -> list[str]:
    """The files and rooms in a room, as its sign names them: `scheduler.py`, `sampling/`."""
    files = [file.name for file in sorted(room.glob("*.py")) if not file.stem.startswith("__")]
    return files + [f"{folder.parent.name}/" for folder in sorted(room.glob("*/__init__.py")) if not folder.parent.is_symlink()]


def test_parts_of_a_room_are_its_files_and_rooms():
    assert parts_of(ROOT / "backends" / "experts") == [
        "base.py", "flashinfer.py", "grouped_mm.py", "one_by_one.py", "sgl_kernel/", "triton/"
    ]  # fmt: skip


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
        "import importlib.util, json, paged_attn.attn_ops.ops.attention\n"
        f"print(json.dumps([name for name in {FOLDERS!r} if importlib.util.find_spec(name)]))"
    )
    assert got == []


def test_attn_ops_loads_no_kernel_no_pass_no_backend():
    names = [name for name in modules() if name.startswith("paged_attn.attn_ops")]
    assert "paged_attn.attn_ops.ops.attention" in names
    loaded = python(f"import importlib, json, sys\nfor m in {names!r}: importlib.import_module(m)\nprint(json.dumps(sorted(sys.modules)))")
    assert set(names) <= set(loaded)
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


def test_what_moved_is_found_where_it_was():
    import paged_attn
    from paged_attn.engine.lead import first_rank_leads

    with pytest.warns(DeprecationWarning, match="from paged_attn import first_rank_leads"):
        from paged_attn.parallel.lead import first_rank_leads as old
    assert old is first_rank_leads is paged_attn.first_rank_leads
