"""The kernels as they would be launched on a Hopper GPU pass Triton's compiler and ptxas."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from tests.backends.without_gpu import printed_by


@pytest.mark.slow
def test_every_variant_compiles_for_sm90() -> None:
    rows = printed_by("tests.backends.scans.compile_scans")
    assert len(rows) == 38 and all(row["cubin"] > 0 and row["shared"] <= 227 << 10 for row in rows)
    assert all(row["spilled"] < 1024 for row in rows), rows
