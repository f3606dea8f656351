"""flash_mla and cutlass_mla through stand-ins that check how they are called (see `fake_sgl_mla`)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.latent import LATENT_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.capabilities import Capabilities, Problem, unmet
from paged_attn.backends.attention.decode_only.cutlass_mla import CutlassMlaBackend
from paged_attn.backends.attention.decode_only.flash_mla import FlashMlaBackend
from paged_attn.backends.attention.hybrid import hybrid_of
from paged_attn.backends.attention.latent import step
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from tests.backends import fake_sgl_mla
from tests.backends.fake_sgl_mla import FakeSglMla
from tests.backends.latent_problems import LAYER, PUBLISHED, STEPS, make, spec_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sgl_kernel") is not None, reason="the real sgl_kernel is installed: see tests/gpu"
)

SPEC = spec_of("512 + 64", 4, PUBLISHED)
BF16 = torch.bfloat16
DECODE = ((70, 1), (127, 1), (128, 1), (1, 1))
BACKENDS = {FlashMlaBackend: 64, CutlassMlaBackend: 128}
TOLERANCE = {BF16: 2e-2, torch.float16: 4e-3}
Decoding = type[FlashMlaBackend] | type[CutlassMlaBackend]


@pytest.fixture(scope="module", autouse=True)
def sgl() -> Iterator[FakeSglMla]:
    with fake_sgl_mla.installed() as fake:
        yield fake


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cls", BACKENDS)
def test_decode(cls: Decoding, dtype: torch.dtype, sgl: FakeSglMla) -> None:
    before = len(sgl.calls)
    make(SPEC, DECODE, BACKENDS[cls], dtype, beside=SPEC).assert_right(cls(), TOLERANCE[dtype])
    assert sgl.calls[before:] == (["schedule", "flash_mla"] if cls is FlashMlaBackend else ["cutlass_mla"])


def test_layers_of_other_kinds_may_share_the_pool_of_flash_mla() -> None:
    make(SPEC, DECODE, 64, BF16).assert_right(FlashMlaBackend(), TOLERANCE[BF16])


@pytest.mark.parametrize("cls", BACKENDS)
def test_behind_a_backend_for_prefill(cls: Decoding, sgl: FakeSglMla, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed steps go to the other one; what is left of a step that is dealt out, if it decodes, does not."""
    monkeypatch.setattr(step, "expands", lambda spec, new, cached: new > 2)
    backend = hybrid_of(TorchNativeBackend(), cls())
    for lengths in (*STEPS.values(), DECODE):
        make(SPEC, lengths, BACKENDS[cls], BF16, beside=SPEC).assert_right(backend, TOLERANCE[BF16])
    assert sgl.calls[-1] == cls.name


@pytest.mark.parametrize("cls", BACKENDS)
def test_a_captured_graph_reads_what_later_steps_bring(cls: Decoding) -> None:
    """What the first plan holds, used for another step in the same tensors of the batch, gives that step's numbers."""
    backend, size = cls(), BACKENDS[cls]
    first, second = (make(SPEC, lengths, size, BF16, padding=0, beside=SPEC) for lengths in (((300, 1), (1, 1)), ((64, 1), (255, 1))))
    table = torch.zeros(2, 6, dtype=torch.int32)
    batch = replace(first.batch, page_table=table)
    plan = backend.plan(batch, second.pool)
    held = [tensor.data_ptr() for tensor in vars(batch).values() if isinstance(tensor, torch.Tensor)]
    for name in ("seq_lens", "slots", "positions", "query_start"):
        getattr(batch, name).copy_(getattr(second.batch, name))
    table[:, : second.batch.page_table.shape[1]] = second.batch.page_table
    backend.plan_in_graph(plan)
    output = torch.full((2, 4, 128), float("nan"), dtype=BF16)
    with ForwardContext(batch, second.pool, backend, plan=plan):
        LATENT_ATTENTION(second.query, second.rows[:, :512], second.rows[:, 512:], second.weight, second.weight, output, LAYER)
    assert (output.double() - second.expected).abs().max() <= 2e-2 * second.expected.abs().max()
    assert held == [tensor.data_ptr() for tensor in vars(batch).values() if isinstance(tensor, torch.Tensor)]


def test_a_larger_workspace_keeps_the_old_one() -> None:
    backend = CutlassMlaBackend()
    small, large = (make(SPEC, ((3, 1),) * n, 128, BF16, beside=SPEC) for n in (2, 5))
    first, second, again = (backend.plan(case.batch, case.pool).workspace for case in (small, large, small))
    assert first.data_ptr() != second.data_ptr() == again.data_ptr() and backend._workspaces[0] is first


def test_cutlass_needs_a_pool_of_rows_alone() -> None:
    case = make(SPEC, DECODE, 128, BF16)
    with pytest.raises(UnsupportedError, match="a pool may contain only rows of one width; got layers of 2 heads over 1 KV"):
        case.run(CutlassMlaBackend())


@pytest.mark.parametrize("cls", BACKENDS)
def test_what_is_not_decode_is_sent_to_a_pair(cls: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "expands", lambda *_: False)
    with pytest.raises(UnsupportedError, match=rf"{cls.name} has decode kernels only .* use backend='{cls.prefill_with},{cls.name}'"):
        make(SPEC, STEPS["mixed"], BACKENDS[cls], BF16, beside=SPEC).run(cls())


@pytest.mark.parametrize("cls", BACKENDS)
def test_an_idle_step_calls_nothing(cls: Decoding, sgl: FakeSglMla) -> None:
    case, before = make(SPEC, DECODE, BACKENDS[cls], BF16, beside=SPEC), len(sgl.calls)
    idle = replace(case, batch=Batch.build([], BACKENDS[cls]), query=case.query[:2], rows=case.rows[:2])
    assert not idle.run(cls()).any() and len(sgl.calls) == before


def reasons(capabilities: Capabilities, **changes: object) -> list[str]:
    architecture, page_size = (90, 64) if capabilities is FlashMlaBackend.capabilities else (100, 128)
    asked = Problem(SPEC, BF16, BF16, page_size, "cuda", architecture, phases=frozenset({"decode"}))
    return unmet(capabilities, replace(asked, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", BACKENDS)
def test_what_it_takes(cls: Decoding) -> None:
    able = cls.capabilities
    assert reasons(able) == []
    assert reasons(able, page_size=16) == [f"page size 16 is not in {BACKENDS[cls]}"]
    assert reasons(able, spec=spec_of("256 + 64", 4, PUBLISHED)) == ["rank of the latent 256 is not in 512"]
    assert reasons(able, spec=AttentionSpec(4, 1, 128, 128, 0.1)) == ["runs layers of latents only"]
    assert reasons(able, phases=frozenset({"extend", "decode"})) == ["serves decode, not extend"]
    assert reasons(able, dtype=torch.float32, kv_dtype=torch.float32) == [
        "dtype float32 is not among bfloat16, float16", "KV dtype float32 is not among bfloat16, float16",
    ]  # fmt: skip


def test_the_gpus_that_they_need() -> None:
    assert reasons(CutlassMlaBackend.capabilities, architecture=90) == ["needs SM100, SM103, this GPU is SM90"]
    assert reasons(FlashMlaBackend.capabilities, architecture=100) == ["needs SM90, this GPU is SM100"]
    assert reasons(CutlassMlaBackend.capabilities, spec=spec_of("512 + 64", 256, PUBLISHED)) == [
        "query heads per KV head 256 is not in 1 to 128"
    ]


@pytest.mark.parametrize("cls", BACKENDS)
def test_the_missing_package_is_named(cls: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel.flashmla_ops", None)
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))  # a build for another GPU
    with pytest.raises(ImportError, match=rf"the {cls.name} backend needs sgl_kernel with .*pip install .*\[sgl\]'"):
        cls()


@pytest.mark.parametrize("cls", BACKENDS)
def test_deterministic_is_refused(cls: Decoding) -> None:
    with pytest.raises(UnsupportedError, match="not batch-invariant"):
        cls(deterministic=True)
