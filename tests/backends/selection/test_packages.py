"""Optional packages and versions, looked up without an import."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

from paged_attn.backends.needs import Requirement
from paged_attn.backends.selection.packages import PACKAGES, OptionalPackage, requirement_words, unmet_requirement
from paged_attn.backends.selection.registry import BUILT_IN, backend_class


def test_packages_are_looked_up_without_importing_them() -> None:
    before = set(sys.modules)
    versions = {package.module: package.version for package in PACKAGES}
    assert set(versions) >= {"triton", "flashinfer", "sgl_kernel", "flash_attn", "matplotlib", "fastapi", "uvicorn"}
    assert not {package.module for package in PACKAGES} & (set(sys.modules) - before)
    assert OptionalPackage("pytest", ("no-such-name", "pytest"), "", "").version == pytest.__version__
    assert OptionalPackage("paged_attn", ("no-such-name",), "", "").version == "unknown"
    assert OptionalPackage("no_such_module", ("pytest",), "", "").version is None


def test_install_lines_name_extras_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for package in PACKAGES:
        if "[" in package.install:
            extra = package.install.partition("[")[2].partition("]")[0]
            names = [line.partition(">")[0] for line in project["optional-dependencies"][extra]]
            assert set(names) & set(package.distributions), package


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch):
    """`flashinfer(version)`: as if it were installed; None for a module without a distribution."""
    real_spec, real_version = importlib.util.find_spec, importlib.metadata.version

    def install(version: str | None) -> None:
        def found(name: str) -> str:
            if name == "flashinfer-python" and version is not None:
                return version
            if name == "flashinfer-python":
                raise importlib.metadata.PackageNotFoundError(name)
            return real_version(name)

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: sys if name == "flashinfer" else real_spec(name))
        monkeypatch.setattr(importlib.metadata, "version", found)

    return install


NEEDS = Requirement("flashinfer", "0.6.8", "pip install it")


@pytest.mark.parametrize("version", ["0.6.8", "0.6.8.post1", "0.6.10", "0.7.0", "1.0", "0.6.8+cu130"])
def test_new_enough(flashinfer, version: str) -> None:
    flashinfer(version)
    assert unmet_requirement(NEEDS) is None


@pytest.mark.parametrize("version", ["0.6.7", "0.6", "0.5.99", "0.6.8rc1", "0.0"])
def test_too_old_says_found_and_needed_and_the_line(flashinfer, version: str) -> None:
    flashinfer(version)
    assert unmet_requirement(NEEDS) == f"needs flashinfer 0.6.8 or newer, found {version}: pip install it"


@pytest.mark.parametrize(("version", "word"), [(None, "unknown"), ("main", "main")])
def test_a_version_that_can_not_be_read_is_not_taken_for_new_enough(flashinfer, version: str | None, word: str) -> None:
    flashinfer(version)
    why = f"needs flashinfer 0.6.8 or newer, and the version of the installed one is {word}: pip install it"
    assert unmet_requirement(NEEDS) == why
    assert unmet_requirement(Requirement("flashinfer", "", "")) is None


def test_missing() -> None:
    assert (
        unmet_requirement(Requirement("no_such_module", "2.0", "pip install it")) == "no_such_module 2.0 is not installed: pip install it"
    )
    assert unmet_requirement(Requirement("no_such_module", "", "do it")) == "no_such_module is not installed: do it"
    assert requirement_words(Requirement("torch", "2.13", "")) == "torch 2.13"


def test_torch_is_a_package_like_any_other() -> None:
    assert unmet_requirement(Requirement("torch", "2.0", "")) is None
    why = unmet_requirement(Requirement("torch", "99", "pip install -U torch"))
    assert why is not None and why.startswith("needs torch 99 or newer, found 2.") and why.endswith(": pip install -U torch")


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_a_backend_needs_has_an_install_line(name: str) -> None:
    for requirement in backend_class(name).capabilities.requirements:
        assert requirement.install and "." not in requirement.module
