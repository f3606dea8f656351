"""Kernels are loaded when CUDA starts, unless the user says otherwise or torch is there already."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paged_attn.cuda_modules import load_kernels_at_start

NAME = "CUDA_MODULE_LOADING"


@pytest.mark.parametrize(("before", "started", "after"), [(None, False, "EAGER"), ("LAZY", False, "LAZY"), (None, True, None)])
def test_the_variable(before: str | None, started: bool, after: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "of this test")  # whatever is set below is undone
    monkeypatch.delenv(NAME) if before is None else monkeypatch.setenv(NAME, before)
    if not started:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    load_kernels_at_start()
    assert os.environ.get(NAME) == after


COMMAND = """
import os, sys
from paged_attn.cli import doctor, main
assert "torch" not in sys.modules, "--help imports torch"
def run(args):
    print(os.environ.get("CUDA_MODULE_LOADING"))
    return 0
doctor.run = run
main.main(["doctor"])
"""
WORKER = """
import os, sys
from types import SimpleNamespace
from paged_attn.bench import worker
assert "torch" not in sys.modules, "the worker imports torch too early"
worker.Job = SimpleNamespace(read=lambda path: SimpleNamespace(system=SYSTEM))
worker.run = lambda job, log: print(os.environ.get("CUDA_MODULE_LOADING"))
worker.main(["job", "log"])
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [(COMMAND, "EAGER"), (WORKER.replace("SYSTEM", "'paged_attn'"), "EAGER"), (WORKER.replace("SYSTEM", "'vllm'"), "None")],
    ids=["command", "our worker", "a peer's worker"],
)
def test_it_is_set_before_torch_is_imported(code: str, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != NAME}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == expected, done.stderr
