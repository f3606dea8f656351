"""The general kernels for experts compile for GPUs of every size, in 16 bits and in float32, and fit."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from tests.backends.gpus import GPUS
from tests.backends.without_gpu import printed_by


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ("h100", "l4", "b200"))
def test_every_tiling_fits(gpu: str) -> None:
    """A published width: of tiny layers' one block of depth no second one is on its way."""
    rows = printed_by("tests.backends.experts.compile_general", gpu)
    products = [row for row in rows if row["kernel"] in ("grouped_first", "grouped_second")]
    assert len(products) >= 20, {row["kernel"] for row in rows}
    for row in rows:
        assert row["shared"] <= GPUS[gpu].shared_bytes and row["spilled"] <= 400, row
