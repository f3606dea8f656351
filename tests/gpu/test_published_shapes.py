"""Four layers at the published width of fifteen families: what tiny models cannot show. See `published_shapes`.

Each family has a process of its own: `pytest -n 5 tests/gpu/test_published_shapes.py`. With SHAPES_JSON=DIR the figures are kept there, and
`python -m tests.gpu.shapes_table DIR` makes docs/published_shapes.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.published_shapes import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
FURTHER = 1.15  # than transformers' own bfloat16 logits, in the median: another order of adding up


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_in_float32_and_logits_in_bfloat16(family: str) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3", "PAGED_ATTN_CACHE": "none", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.published_shapes", family]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("{"), done.stderr[-3000:]
    report = json.loads(done.stdout)
    if folder := os.environ.get("SHAPES_JSON"):
        Path(folder, f"{family}.json").write_text(done.stdout)
    assert "crash" not in report and "refused" not in report, report
    assert all(all(equal) for equal in report["fp32_equal"]), report["fp32_equal"]
    assert report["bf16_ours"]["median"] <= FURTHER * report["bf16_theirs"]["median"], report
