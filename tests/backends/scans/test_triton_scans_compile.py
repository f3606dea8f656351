"""The kernels as they would be launched on a Hopper GPU pass Triton's compiler and ptxas."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_every_variant_compiles_for_sm90() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.scans.compile_for_hopper"]
    result = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=400)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == 16 and all(row["cubin"] > 0 and row["shared"] <= 227 << 10 for row in rows)
    assert all(row["spilled"] < 1024 for row in rows), rows
