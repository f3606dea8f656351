"""The wheel and the sdist hold everything, and import from inside themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import paged_attn

ROOT = Path(__file__).parent.parent
CODE = """
import sys, paged_attn, paged_attn.attn_ops.ops.attention as op
import paged_attn.passes.runner, paged_attn.capture.split.split_graph, paged_attn.backends.selection.select
site = sys.argv[1]
assert paged_attn.__file__.startswith(site) and op.__file__.startswith(site), (paged_attn.__file__, op.__file__)
assert not {"attn_ops", "passes", "capture", "backends"} & set(sys.modules)
from importlib.metadata import entry_points, version
assert version("paged-attn") == paged_attn.__version__
assert {e.value for e in entry_points(group="torch_dynamo_backends", name="paged_attn")} == {"paged_attn.dynamo_backend:paged_attn"}
from paged_attn.cli.main import main
sys.exit(main(["doctor"]))
"""


@pytest.mark.parametrize("name", paged_attn.__all__)
def test_every_exported_name_can_be_imported(name: str) -> None:
    assert getattr(paged_attn, name) is not None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, which is built from a copy of the checkout: building writes into its folder, which other tests read."""
    out, copied = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("copied") / "checkout"
    shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out", "tests"))
    built = subprocess.run([sys.executable, "-m", "build", "--outdir", str(out), str(copied)], capture_output=True, text=True, timeout=400)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_the_model(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("attn_ops", "backends", "capture", "passes"):
        assert {f"paged_attn/{p.relative_to(ROOT)}" for p in (ROOT / folder).rglob("*.py")} <= names
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "paged_attn").rglob("*") if p.suffix in (".py", ".json", ".safetensors")} <= names
    assert not [n for n in names if n.split("/")[0] not in ("paged_attn", f"paged_attn-{wheel.name.split('-')[1]}.dist-info")]


@pytest.mark.slow
def test_the_installed_wheel_works_from_another_folder_and_from_the_root(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    for folder in (tmp_path, ROOT):
        # -P keeps the working folder off the path, as an installed program has it.
        run = [sys.executable, "-P", "-c", CODE, str(site)]
        result = subprocess.run(run, cwd=folder, env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, text=True,
                                capture_output=True)  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
