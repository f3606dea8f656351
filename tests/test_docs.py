"""README.md, DESIGN.md and docs: every Python block runs, every link leads somewhere, every path that is named exists and has what it is
said to have.

A block runs as it is, on a CPU and without a network; the blocks of a page share one namespace, in order. What needs a GPU, a server, the
Hub or minutes begins with ```python no-run, and must compile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages
from tests.pages import ROOT, all_pages, anchors, bare_files, blocks, links, pairs, paths

PAGES = all_pages()
WITH_CODE = [page for page in PAGES if any(block.runs for block in blocks((ROOT / page).read_text(encoding="utf-8")))]
# Folders that some machines lack: what is made here, and what users have.
MADE = ("build/", "dist/", "dump/")
# Files of others that pages name.
THEIRS = {"README.md": {"model.py"}}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float]]:
    """All pages in one fresh process, away from the root: what failed in each, and how long it took.

    The cache on disk, empty at first, spares all engines but the first the tracing.
    """
    folder = tmp_path_factory.mktemp("pages")
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "COV_CORE_SOURCE")}
    given = {"PAGED_ATTN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", str(ROOT / "tests" / "pages.py"), *WITH_CODE]
    done = subprocess.run(command, cwd=folder, env=kept | given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, tuple[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE)
def test_every_block_runs(page: str, runs: dict[str, tuple[str, float]]) -> None:
    failed, _ = runs[page]
    if failed:
        pytest.fail(f"{failed}\nWhat cannot run here begins with ```python {pages.NO_RUN}", pytrace=False)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_compiles_and_says_no_more_than_no_run(page: str) -> None:
    for block in blocks(text_of(page)):
        assert block.words in (("python",), ("python", pages.NO_RUN)), f"{page}:{block.line - 1}: {' '.join(block.words)}"
        block.compiled(page)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    dead = []
    for target in links(text_of(page)):
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8"))):
            dead.append(target)
    assert not dead, f"{page} links to {dead}"


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists(page: str) -> None:
    gone = [path for path in paths(text_of(page)) if not path.startswith(MADE) and not any((at / path).exists() for at in places(page))]
    assert not gone, f"{page} names {gone}"


def places(page: str) -> list[Path]:
    """Where a path may begin: at the root, in the package, beside the page."""
    return [ROOT, ROOT / "paged_attn", (ROOT / page).parent]


def files_meant(page: str, named: str) -> list[Path]:
    """The files that `named`, a path or a bare name, may mean on a page: a bare one lies in or below a folder that the page names."""
    if "/" in named:
        return [at / named for at in places(page) if (at / named).is_file()]
    text = text_of(page)
    known = [(at / path).resolve() for path in (*paths(text), *links(text)) for at in places(page) if (at / path).exists()]
    rooms = {path if path.is_dir() else path.parent for path in known} - {ROOT}
    return sorted({file for room in rooms for file in room.rglob(named)})


@pytest.mark.parametrize("page", PAGES)
def test_every_bare_file_lies_in_a_folder_that_the_page_names(page: str) -> None:
    bare = sorted(set(bare_files(text_of(page))) - THEIRS.get(page, set()))
    gone = [f"`{name}`: {'name its folder' if any(ROOT.rglob(name)) else 'no such file'}" for name in bare if not files_meant(page, name)]
    assert not gone, f"{page}: {'; '.join(gone)}"


@pytest.mark.parametrize("page", PAGES)
def test_every_name_is_in_the_file_that_is_said_to_have_it(page: str) -> None:
    gone = [
        f"`{name}` is not in {file}"
        for file, name in pairs(text_of(page))
        if not any(re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")) for path in files_meant(page, file))
    ]
    assert not gone, f"{page}: {'; '.join(gone)}"


def test_every_page_is_on_the_page_of_pages() -> None:
    first = "docs/README.md"
    linked = {str((ROOT / first).parent.joinpath(link.partition("#")[0]).resolve().relative_to(ROOT)) for link in links(text_of(first))}
    assert not {*PAGES} - linked - {first, "README.md"}, "link them in docs/README.md, under the question that each answers"


EXAMPLE = """# One page
## `a` and [b](c.md)!
## Same
## Same
Text with [a link](docs/a.md#part), ![a picture](b.svg "title"), [another](https://example.com/x.md), `[code](no.md)`.
```python
x = 1
```
- a list:
  ```python no-run
  if x:
      y = passes/no_such.py
  ```
```console
$ python examples/gone.py --model org/name
```
Paths: `passes/pass_list.py:12`, `tests/a.py::test_b`, `and/or`, ``backends/attention``, `python benchmarks/x.py`, `org/name`,
`~/.cache/x.json`. See `a.py`, `one`, `two.three` and `four()` in `docs/b.py`; `c.py`: `five` or `six`, and `seven`
in `d.py`, not `eight`.
"""


def test_pages_are_read() -> None:
    assert [(b.words, b.line, b.code, b.runs) for b in blocks(EXAMPLE)] == [
        (("python",), 7, "x = 1\n", True), (("python", "no-run"), 11, "if x:\n    y = passes/no_such.py\n", False),
    ]  # fmt: skip
    assert links(EXAMPLE) == ["c.md", "docs/a.md#part", "b.svg"]
    assert anchors(EXAMPLE) == {"one-page", "a-and-b", "same", "same-1"}
    named = ["passes/no_such.py", "examples/gone.py", "passes/pass_list.py", "tests/a.py", "backends/attention", "benchmarks/x.py"]
    assert paths(EXAMPLE) == [*named, "docs/b.py"]
    assert bare_files(EXAMPLE) == ["a.py", "c.py", "d.py"]
    found = {"docs/b.py": ("one", "three", "four"), "c.py": ("five", "six", "seven")}
    assert pairs(EXAMPLE) == [(file, name) for file, names in found.items() for name in names]


def test_a_block_that_fails_is_reported_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text("```python\nx = 1\n```\ntext\n```python no-run\nx = 1 / 0\n```\n```python\nprint('so')\nx / 0\n```\n")
    failed = pages.run("a.md")
    assert 'File "a.md", line 10' in failed and "ZeroDivisionError" in failed and failed.endswith("printed: so\n")
    (tmp_path / "a.md").write_text("```python\nx = 1\n```\n```python\nassert x == 1\n```\n")
    assert pages.run("a.md") == ""
