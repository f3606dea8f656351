"""Programs that compile kernels for a GPU that is not there run in a process of their own, without Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def printed_by(module: str, *arguments: str) -> list[Any]:
    """What a module prints that is run, JSON by line."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-m", module, *arguments], env=environment, text=True, capture_output=True, timeout=1200)
    assert result.returncode == 0, result.stderr[-2000:]
    return list(map(json.loads, result.stdout.splitlines()))
