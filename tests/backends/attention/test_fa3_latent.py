"""fa3 on rows of latents: queries of latents as `q_v`, through the op that checks what the real one does (see `fake_fa3`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from paged_attn.backends.attention.capabilities import Problem, unmet
from paged_attn.backends.attention.fa3 import FA3Backend
from paged_attn.backends.attention.latent import step
from tests.backends import fake_fa3
from tests.backends.fake_fa3 import FakeFA3
from tests.backends.latent_problems import PUBLISHED, STEPS, make, spec_of
from tests.backends.problems import spec_of as plain_spec

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sgl_kernel") is not None, reason="the real sgl_kernel is installed: see tests/gpu"
)

SPEC = spec_of("512 + 64", 4, PUBLISHED)
BF16 = torch.bfloat16
TOLERANCE = {BF16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(scope="module")
def op() -> Iterator[FakeFA3]:
    with fake_fa3.installed() as fake:
        yield fake


@pytest.fixture
def absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "expands", lambda *_: False)


@pytest.mark.usefixtures("absorbed")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("lengths", STEPS)
def test_every_step(op: FakeFA3, lengths: str, page_size: int, dtype: torch.dtype) -> None:
    before = len(op.kernels)
    make(SPEC, STEPS[lengths], page_size, dtype, beside=SPEC).assert_right(FA3Backend(), TOLERANCE[dtype])
    assert len(op.kernels) == before + 1, "one call of the kernel"


def test_latents_beside_keys_and_values(op: FakeFA3) -> None:
    beside = replace(plain_spec(), qk_head_dim=64, v_head_dim=64)
    make(SPEC, STEPS["decode"], 16, BF16, beside=beside).assert_right(FA3Backend(), TOLERANCE[BF16])


def test_a_dealt_out_step(op: FakeFA3) -> None:
    """As the engine runs it: only decoding requests and short extensions meet rows."""
    before = len(op.kernels)
    lengths = ((40, 1), (0, 200), (16, 2), (3, 1))
    make(SPEC, lengths, 16, BF16, beside=SPEC).assert_right(FA3Backend(), TOLERANCE[BF16])
    assert len(op.kernels) == before + 1


@pytest.mark.usefixtures("absorbed")
def test_unused_slots_of_large_pages_are_not_read(op: FakeFA3, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA would read them: 20 tokens of 4 heads are more than a tile. Without the way around it, the result is NaN."""
    case = make(SPEC, ((3, 20), (70, 1)), 64, BF16, beside=SPEC)
    case.assert_right(FA3Backend(), TOLERANCE[BF16])
    monkeypatch.setattr("paged_attn.backends.attention.fa3.SMALLEST_KEY_BLOCK", 1 << 30)
    case = make(SPEC, ((3, 20), (70, 1)), 64, BF16, beside=SPEC)
    assert case.run(FA3Backend()).isnan().any()


def test_which_latents_it_takes() -> None:
    def reasons(kind: str, architecture: int = 90) -> list[str]:
        return unmet(FA3Backend.capabilities, Problem(spec_of(kind, 16, PUBLISHED), BF16, BF16, 16, "cuda", architecture))

    assert reasons("512 + 64") == []
    assert reasons("256 + 64") == ["rank of the latent 256 is not in 512"]
    assert reasons("512 + 0") == ["rotated part of the latent 0 is not in 64"]
    assert reasons("512 + 64", 100) == ["needs SM90, this GPU is SM100"]
