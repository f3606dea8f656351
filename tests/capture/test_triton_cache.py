"""Triton's cache does not move while a process runs, and its keys do not change."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paged_attn.capture.inductor.triton_cache import pin_triton_cache

triton = pytest.importorskip("triton", reason="Triton is not installed")


def test_it_is_tritons_own_folder_unless_the_user_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    pin_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    own = str(triton.knobs.cache.dir)
    pin_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == own


MOVES = """
import os
import triton
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
PIN
before = triton.knobs.cache.dir
if os.getenv("TRITON_CACHE_DIR") is None:  # what Inductor does for its first kernel
    os.environ["TRITON_CACHE_DIR"] = triton_cache_dir(0)
print(before == triton.knobs.cache.dir)
"""


@pytest.mark.parametrize(
    ("pin", "stays"), [("", "False"), ("from paged_attn.capture.inductor.triton_cache import pin_triton_cache as p; p()", "True")]
)
def test_inductor_moves_it_otherwise(pin: str, stays: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    done = subprocess.run([sys.executable, "-c", MOVES.replace("PIN", pin)], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == stays, done.stderr


def test_inductors_assembler_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime import compile_tasks

    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda: os.environ.update(TRITON_PTXAS_PATH="/inductors"))
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    pin_triton_cache()
    assert os.environ["TRITON_PTXAS_PATH"] == "/inductors"
