"""The kernels as they would be launched on a Hopper GPU pass Triton's compiler and ptxas, and fit its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
SHARED_BYTES = 227 * 1024  # of a block on SM90


@pytest.mark.slow
def test_both_kernels_compile_for_sm90_and_fit() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.lora.compile_for_hopper"]
    result = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=400)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = list(map(json.loads, result.stdout.splitlines()))
    assert len(rows) == 27
    for row in rows:
        assert row["shared"] <= SHARED_BYTES and row["waits"] and row["has_dot"] is (row["kind"] != "fp32"), row
