"""The kernels as they would be launched on a Hopper GPU pass Triton's compiler and ptxas, and fit its shared memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from tests.backends.without_gpu import printed_by

SHARED_BYTES = 227 * 1024  # of a block on SM90


@pytest.mark.slow
def test_both_kernels_compile_for_sm90_and_fit() -> None:
    rows = printed_by("tests.backends.lora.compile_adapters")
    assert len(rows) == 27 + 3 * 2 * 8
    for row in rows:
        assert row["shared"] <= SHARED_BYTES and row["waits"] and row["has_dot"] is (row["kind"] != "fp32"), row
