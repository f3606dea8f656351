"""The kernels as they would be launched on a GPU pass Triton's compiler and ptxas, and fit its shared memory."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
from tests.backends.gpus import GPUS
from tests.backends.without_gpu import printed_by

SHARED_BYTES = GPUS["h100"].shared_bytes
FEW_KEYS = ("decode_short", "decode_short_256", "decode_features")  # a window of 512 leaves as few as a short request has
MOST_SPILLED = {"one": 112, "all": 400}  # bytes of a thread of the kernel for Hopper: with one feature, with all
HOPPER_BLOCKS = {
    "extend": 128, "extend_window": 128, "extend_64": 128, "extend_all": 128, "extend_all_64": 128,
    "extend_short": 64, "extend_all_short": 64, "extend_all_64_short": 64, "extend_192": 128, "extend_192_short": 64, "extend_all_192": 128,
    "extend_256": 64, "extend_all_256": 64, "extend_all_80": 128, "extend_96": 128, "extend_160": 64, "extend_all_192_192": 64,
}  # fmt: skip


def rows_of(module: str, gpu: str = "h100") -> dict[str, dict[str, Any]]:
    """What it prints, by variant."""
    return {row["variant"]: row for row in printed_by(module, gpu)}


@pytest.mark.slow
def test_every_variant_compiles_for_sm90_and_fits() -> None:
    rows = rows_of("tests.backends.compile_attention")
    assert len(rows) == 37 and HOPPER_BLOCKS.keys() < rows.keys()
    for name, row in rows.items():
        assert row["shared"] <= SHARED_BYTES and row["cubin"] > 0, row
        assert row["hopper"] is (name in HOPPER_BLOCKS) and row["block_n"] == HOPPER_BLOCKS.get(name, row["block_n"]), row
        if row["hopper"]:
            assert row["spilled"] <= MOST_SPILLED["all" if "all" in name else "one"], row
        assert row["early"] is (name in FEW_KEYS), row
        assert not name.startswith("together") or row["spilled"] <= 32, row  # two programs of 255 registers fill a multiprocessor


@pytest.mark.slow
def test_latent_attention_compiles_for_sm90_and_fits() -> None:
    """With all programs that a multiprocessor is to have at once. Bytes that a thread spills are few beside its 1,020 of registers."""
    rows = rows_of("tests.backends.compile_latents")
    assert len(rows) == 31
    for name, row in rows.items():
        assert row["hopper"] is (name.endswith("on Hopper") and name != "512 + 64, 16 heads, one, on Hopper"), row
        assert 0 < row["shared"] <= SHARED_BYTES and row["registers"] <= 65536, row
        assert row["spilled"] <= 160 and row["merge_spilled"] == row["store_spilled"] == 0, row


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "gpu", "count"), (("attention", "l4", 7), ("latents", "l4", 10), ("latents", "b200", 10)))
def test_other_gpus_have_other_blocks(kernels: str, gpu: str, count: int) -> None:
    rows = rows_of(f"tests.backends.compile_{kernels}", gpu)
    assert len(rows) >= count
    for row in rows.values():
        assert 0 < row["shared"] / row.get("programs", 1) <= GPUS[gpu].shared_bytes and not row["hopper"], row  # one program has to fit
