"""`paged-attn doctor`: versions, optional packages, attention backends, and a smoke test; status 0 only if what is needed works."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING

from paged_attn.cli.commands.demo import embedded_model

if TYPE_CHECKING:
    from paged_attn.backends.selection.packages import OptionalPackage

HELP = "check this installation"
IMPORT_SECONDS, SMOKE_SECONDS = 120, 600  # the second includes what a backend compiles on first use


@dataclass(frozen=True)
class Finding:
    """One line. `works` is None for what is optional and absent: no failure. Nor is an optional thing that does not work."""

    name: str
    works: bool | None
    detail: str
    optional: bool = False

    @property
    def failed(self) -> bool:
        return self.works is False and not self.optional

    def line(self) -> str:
        word = "warn" if self.works is False and self.optional else {True: "ok", False: "FAIL", None: "-"}[self.works]
        return f"{word:<5} {self.name:<16} {self.detail}"


def run(args: argparse.Namespace) -> int:
    failed = []
    for check in (_python, _required, _gpus, _entry_point, _embedded, _optional, _backends, _smoke_test):
        found = check()
        for finding in found if isinstance(found, list) else [found]:
            print(finding.line(), flush=True)
            failed += [finding.name] if finding.failed else []
    print(f"\nnot working: {', '.join(failed)}" if failed else "\neverything that is needed works")
    return 1 if failed else 0


def _python() -> Finding:
    return Finding("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _required() -> list[Finding]:
    found = []
    for name in ("torch", "transformers"):
        try:
            found.append(Finding(name, True, version(name)))
        except PackageNotFoundError:
            found.append(Finding(name, False, f"not installed: pip install {name}"))
    return found


def _gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = f"PyTorch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "PyTorch is built without CUDA"
        return [Finding("GPU", None, f"none visible; {built}")]
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        Finding(f"GPU {i}", True, f"{p.name}, SM{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
        for i, p in enumerate(found)
    ]


def _entry_point() -> Finding:
    names = {entry.name for entry in entry_points(group="torch_dynamo_backends")}
    if "paged_attn" in names:
        return Finding("torch.compile", True, 'finds backend="paged_attn" through its entry point')
    return Finding(
        "torch.compile", False, 'no entry point "paged_attn" in torch_dynamo_backends: install the package (pip install -e . in a checkout)'
    )


def _embedded() -> Finding:
    folder = embedded_model()
    return Finding("embedded model", True if folder else None, str(folder or "not in this installation; no `paged-attn demo`"))


def _optional() -> list[Finding]:
    """Each installed package is imported, in a process of its own: a library for another driver or torch may end the process."""
    from paged_attn.backends.selection.packages import PACKAGES

    started = {package: _started("-c", f"import {package.module}") for package in PACKAGES if package.is_installed}
    return [_package(package, started.get(package)) for package in PACKAGES]


def _package(package: OptionalPackage, importing: subprocess.Popen[str] | None) -> Finding:
    if importing is None:
        return Finding(package.module, None, f"not installed; {package.gives}: {package.install}")
    _, error = _ended(importing, IMPORT_SECONDS)
    if error is None:
        return Finding(package.module, True, f"{package.version}: {package.gives}")
    return Finding(package.module, False, f"{package.version} is installed, but import fails ({error}); {package.install}", optional=True)


def _backends() -> list[Finding]:
    """On a GPU every backend that can run on it computes a tiny problem; those of other hardware are not listed."""
    import torch

    from paged_attn.backends.selection.ranking import ORACLE
    from paged_attn.report.backend_matrix import attention_rows

    found = {row["Backend"]: row["Here"] for row in attention_rows()}
    gpu = torch.cuda.is_available()
    return [_backend(name, here, gpu and here.startswith("yes") and "cuda" in here) for name, here in found.items() if name != ORACLE]


def _backend(name: str, here: str, test: bool) -> Finding:
    label = f"  {name}"
    if not test:
        return Finding(label, None, f"backend, {here.removeprefix('no: ')}" if here.startswith("no") else f"backend, runs on {here[5:]}")
    began = time.perf_counter()
    output, error = _ended(_started("-m", "paged_attn.cli.smoke", name, "cuda"), SMOKE_SECONDS)
    if error is not None:
        return Finding(label, False, f"backend, fails on this GPU: {error}", optional=name != "torch_native")
    found, allowed = map(float, output.split()[-2:])
    words = f"backend, differs from the reference by {found:.1e} (allowed {allowed:.0e}), in {time.perf_counter() - began:.1f} s"
    return Finding(label, found <= allowed, words, optional=name != "torch_native")


def _started(*arguments: str) -> subprocess.Popen[str]:
    # -P keeps the working folder off the path, as an installed program has it.
    return subprocess.Popen([sys.executable, "-P", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _ended(process: subprocess.Popen[str], seconds: float) -> tuple[str, str | None]:
    """What it printed, and what went wrong: its last line on stderr, its signal, or that it took too long."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "", f"it did not end within {seconds:g} s"
    if process.returncode == 0:
        return output, None
    if process.returncode < 0:
        return output, f"ended by signal {-process.returncode}"
    return output, (errors.strip().splitlines() or [f"status {process.returncode}"])[-1]


def _smoke_test() -> Finding:
    started = time.perf_counter()
    error = op_error()
    words = f"the op on the CPU: torch_native and reference differ by {error:.1e}, in {time.perf_counter() - started:.2f} s"
    return Finding("smoke test", error < 1e-5, words)


def op_error() -> float:
    """Largest difference between torch_native and the reference, through the op, on the CPU."""
    import torch

    from paged_attn.backends.attention.torch_native import TorchNativeBackend
    from paged_attn.cli.smoke import smoke_error

    return smoke_error(TorchNativeBackend(), torch.device("cpu"))[0]
