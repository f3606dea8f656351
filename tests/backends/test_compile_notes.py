"""A second process asks for no kernel that lies in Triton's cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")
from tests.backends.without_gpu import printed_by


def test_a_second_start_asks_for_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    asked = [printed_by("tests.backends.ask_for_a_kernel")[0] for _ in range(2)]
    assert asked == [{"asked": 1, "failed": []}, {"asked": 0, "failed": []}]
    shutil.rmtree(tmp_path / "triton")  # the notes go with the kernels
    assert printed_by("tests.backends.ask_for_a_kernel") == [{"asked": 1, "failed": []}]
