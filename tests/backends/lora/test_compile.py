"""The kernels as they would be launched on GPUs that are not here pass Triton's compiler and ptxas, and fit their shared memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from tests.backends.gpus import GPUS
from tests.backends.without_gpu import printed_by


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "count"), [("h100", 11), ("l4", 4)])
def test_all_kernels_compile_and_fit(gpu: str, count: int) -> None:
    rows = printed_by("tests.backends.lora.compile_adapters", gpu)
    assert len(rows) == 3 * count
    for row in rows:
        assert row["shared"] <= GPUS[gpu].shared_bytes and row["has_dot"] is (row["kind"] != "fp32"), row
        assert row["waits"] is GPUS[gpu].machine.early, row
