"""The kernel of latent attention for Hopper, its threads and barriers on the CPU (`gluon_on_cpu`), against the model's own formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.latent import step
from paged_attn.backends.attention.reference import ReferenceBackend
from tests.backends.attention.test_triton_latent import MACHINE, attend
from tests.backends.latent_problems import PUBLISHED, Case, make, spec_of

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself runs where there is a GPU")
if not torch.cuda.is_available():
    from paged_attn.backends.attention.triton.backend import TritonBackend
    from paged_attn.backends.attention.triton.tiling import in_latent_hopper, prefers_latent_hopper, tiling
    from paged_attn.backends.machine import Machine
    from tests.backends.gluon_on_cpu import on_cpu
ROOM = "paged_attn.backends.attention.triton."
DECODE, MIXED = ((70, 1), (63, 1), (0, 1), (300, 1)), ((17, 1), (0, 1), (6, 5), (130, 1), (0, 9))


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Constants of what ran, wherever the kernel is written for it. Three multiprocessors, so that items are cut, and shares have the
    end of one and all of another."""
    kernel = on_cpu(ROOM + "latent.hopper_kernel", "attend_latent_hopper", (ROOM + "latent.hopper", ROOM + "hopper", ROOM + "tiles"))
    found = []

    def run(key: Any, grid: Any, arguments: Any, constants: dict[str, Any], options: Any, device: int) -> None:
        found.append(constants)
        kernel(key, grid, arguments, constants, options, device)

    monkeypatch.setattr(ROOM + "latent.launch._hopper_kernel", lambda: run)
    monkeypatch.setattr(step, "expands", lambda *_: False)
    monkeypatch.setattr(ROOM + "tiling.prefers_latent_hopper", lambda rows, spec: rows != "all")
    monkeypatch.setattr(MACHINE, lambda device: Machine(3, hopper=True, early=False))
    return found


def case_of(kind: str, heads: int, page_size: int, lengths: tuple[tuple[int, int], ...]) -> Case:
    """Between layers of the same rows: everything begins on 16 bytes."""
    spec = spec_of(kind, heads, PUBLISHED)
    return make(spec, lengths, page_size, torch.float16, beside=spec)


@pytest.mark.parametrize(
    ("kind", "heads", "page_size", "lengths"),
    [("512 + 64", 24, 64, DECODE), ("512 + 64", 128, 64, DECODE), ("512 + 64", 20, 16, MIXED), ("256 + 64", 40, 128, MIXED),
     ("256 + 64", 3, 3, DECODE)],
)  # fmt: skip
def test_steps(launches: list[dict[str, Any]], kind: str, heads: int, page_size: int, lengths: tuple[tuple[int, int], ...]) -> None:
    case_of(kind, heads, page_size, lengths).assert_right(TritonBackend(), 4e-3)
    assert {constants["ROWS"] for constants in launches} == ({"one"} if lengths is DECODE else {"one", "more"})


def test_log_sum_exps_and_strided_operands(launches: list[dict[str, Any]]) -> None:
    case = case_of("256 + 64", 4, 16, DECODE)
    (expected, theirs), (output, lse) = attend(case, ReferenceBackend()), attend(case, TritonBackend())
    torch.testing.assert_close(output, expected, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(lse, theirs, atol=4e-3, rtol=4e-3)
    assert launches and launches[0]["HAS_LSE"]


def test_what_it_takes() -> None:
    """16 bits, not deterministic, rows of a size that it is written for, more heads than 16."""
    machine = Machine(132, hopper=True, early=True)

    def takes(spec: LatentSpec, rows: Any = "one", dtype: torch.dtype = torch.bfloat16) -> bool:
        return tiling(rows, spec, dtype, 1, 9000, 9000, machine).hopper

    specs = {kind: spec_of(kind, 20, PUBLISHED) for kind in PUBLISHED}
    assert {kind for kind, spec in specs.items() if takes(spec)} == {"512 + 64", "256 + 64"}
    first = specs["512 + 64"]
    assert in_latent_hopper(first) and takes(first, "more") and not takes(first, "all") and not takes(first, dtype=torch.float32)
    assert not takes(spec_of("512 + 64", 16, PUBLISHED)), "16 rows are faster in Triton"
    assert prefers_latent_hopper("one", first) and not prefers_latent_hopper("more", first), "it has not run on a GPU for these"
    assert not prefers_latent_hopper("one", specs["256 + 64"])
