"""The kernels as they would be launched on a Hopper GPU pass Triton's compiler and ptxas, and fit its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
SHARED_BYTES = 227 * 1024  # of a block on SM90
HOPPER = {"extend": True, "extend_window": True, "extend_64": True, "extend_all": True, "extend_short": True}


@pytest.mark.slow
def test_every_variant_compiles_for_sm90_and_fits() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.compile_for_hopper"]
    result = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=400)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = {row["variant"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert len(rows) == 11
    for name, row in rows.items():
        assert row["shared"] <= SHARED_BYTES and row["cubin"] > 0, row
        assert row["hopper"] is HOPPER.get(name, False), row
