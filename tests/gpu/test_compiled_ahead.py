"""No kernel of attention, scans, routing or experts is compiled by the process that launches it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Sampling has its own batches.
ALLOWED = {"spread", "choose", "weigh", "draw", "best_of_part", "best_of_row"}


@pytest.mark.parametrize("model_type", ("llama", "deepseek_v2", "qwen3_next", "bamba"))
def test_no_launch_compiles(model_type: str, tmp_path: Path) -> None:
    empty = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "PAGED_ATTN_CACHE")}
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.compiled_at_launch", model_type]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | empty, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    late = [f"{name} {variant}" for name, variant in told["compiled"] if name not in ALLOWED]
    assert not late, "\n".join([*late, "asked for were", *told["asked"]])
