"""TensorRT-LLM's latent attention through FlashInfer, with a stand-in that checks how it is called (see `fake_flashinfer`)."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.specs.latent import LatentSpec
from paged_attn.backends.attention.capabilities import Problem, unmet
from paged_attn.backends.attention.flashinfer import trtllm, wrappers
from paged_attn.backends.attention.flashinfer.trtllm import TrtllmMlaBackend
from paged_attn.backends.attention.hybrid import hybrid_of
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from tests.backends.flashinfer import fake_flashinfer
from tests.backends.flashinfer.fake_flashinfer import CALLS
from tests.backends.latent_problems import PUBLISHED, STEPS, make, spec_of

SPEC = spec_of("512 + 64", 4, PUBLISHED)
BF16 = torch.bfloat16
DECODE = ((70, 1), (127, 1), (128, 1), (1, 1), (300, 1))


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(wrappers, "MIN_WORKSPACE", 0)
    monkeypatch.setattr(trtllm, "WORKSPACE", 16 << 20)
    return fake_flashinfer.install(monkeypatch)


@pytest.mark.parametrize("kind", ["512 + 64", "256 + 64"])
@pytest.mark.parametrize("page_size", [32, 64])
def test_decode(page_size: int, kind: str) -> None:
    spec = spec_of(kind, 4, PUBLISHED)
    make(spec, DECODE, page_size, BF16, beside=spec).assert_right(TrtllmMlaBackend(), 2e-2)
    assert CALLS == ["trtllm-gen"]


def test_behind_a_backend_for_prefill() -> None:
    backend = hybrid_of(TorchNativeBackend(), TrtllmMlaBackend())
    for lengths in (*STEPS.values(), DECODE):
        make(SPEC, lengths, 64, BF16, beside=SPEC).assert_right(backend, 2e-2)


def test_the_page_table_is_made_in_the_graph() -> None:
    backend, case = TrtllmMlaBackend(), make(SPEC, ((300, 1), (5, 1)), 32, BF16, beside=SPEC)
    plan = backend.plan(case.batch, case.pool)
    case.batch.page_table.add_(1)
    backend.plan_in_graph(plan)
    width = case.batch.page_table.shape[1]
    assert (
        plan.page_table.shape == (2, 12)
        and plan.page_table[:, :width].equal(case.batch.page_table)
        and not plan.page_table[:, width:].any()
    )


def test_other_layers_are_refused() -> None:
    case = make(SPEC, DECODE, 64, BF16)
    with pytest.raises(UnsupportedError, match=r"trtllm_mla reads rows of latents, .* layer 0 \(2 heads over 1 KV"):
        case.run(TrtllmMlaBackend())


def test_an_idle_step_calls_nothing_and_extending_ones_are_sent_to_a_pair() -> None:
    case = make(SPEC, DECODE, 64, BF16, beside=SPEC)
    assert not replace(case, batch=Batch.build([], 64), query=case.query[:2], rows=case.rows[:2]).run(TrtllmMlaBackend()).any()
    with pytest.raises(UnsupportedError, match=r"decode kernels only .*use backend='triton,trtllm_mla'"):
        make(SPEC, ((50, 2),), 64, BF16, beside=SPEC).run(TrtllmMlaBackend())
    assert not CALLS


def test_what_it_takes() -> None:
    def reasons(spec: LatentSpec = SPEC, dtype: torch.dtype = BF16, page_size: int = 64, architecture: int = 100) -> list[str]:
        problem = Problem(spec, dtype, dtype, page_size, "cuda", architecture, phases=frozenset({"decode"}))
        return unmet(TrtllmMlaBackend.capabilities, problem)

    assert reasons() == reasons(page_size=32) == reasons(spec_of("256 + 64", 4, PUBLISHED), architecture=103) == []
    assert reasons(architecture=90) == ["needs SM100, SM103, this GPU is SM90"]
    assert reasons(page_size=16) == ["page size 16 is not in 32, 64"]
    assert reasons(spec_of("256 + 32", 4, PUBLISHED)) == ["rotated part of the latent 32 is not in 64"]
    assert len(reasons(dtype=torch.float16)) == 2
