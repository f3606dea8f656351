"""Rows of latents through FlashInfer's wrapper for them, against the model's own formula and with the stand-in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.latent import LATENT_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.capabilities import Problem, unmet
from paged_attn.backends.attention.flashinfer import choose, kinds, planner
from paged_attn.backends.attention.flashinfer.backend import FlashInferBackend
from paged_attn.backends.attention.flashinfer.choose import latent_items
from paged_attn.backends.attention.flashinfer.kinds import Kind
from paged_attn.backends.attention.latent import step
from paged_attn.backends.attention.reference import ReferenceBackend
from tests.backends.flashinfer.fake_flashinfer import CALLS
from tests.backends.latent_problems import LAYER, PUBLISHED, STEPS, Case, make, spec_of

SPEC = spec_of("512 + 64", 4, PUBLISHED)
BF16 = torch.bfloat16
TOLERANCE = {BF16: 2e-2, torch.float16: 4e-3}


@pytest.fixture
def absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "expands", lambda *_: False)


def check(case: Case, backend: FlashInferBackend) -> None:
    case.assert_right(backend, TOLERANCE[case.query.dtype])


@pytest.mark.usefixtures("absorbed")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("lengths", STEPS)
def test_every_step(lengths: str, page_size: int, dtype: torch.dtype, backend: FlashInferBackend) -> None:
    check(make(SPEC, STEPS[lengths], page_size, dtype, beside=SPEC), backend)
    assert CALLS == ["latent:fa2" if lengths == "decode" else "latent:fa2:causal"]


@pytest.mark.usefixtures("absorbed")
def test_decoding_requests_of_a_mixed_step_run_apart(backend: FlashInferBackend) -> None:
    lengths = ((5, 1), (8, 1), (3, 1), (7, 1), (4, 6), (0, 3))
    check(make(SPEC, lengths, 16, BF16, beside=SPEC), backend)
    assert CALLS == ["latent:fa2", "latent:fa2:causal"]


def test_latents_beside_keys_and_values(backend: FlashInferBackend) -> None:
    check(make(SPEC, STEPS["decode"], 16, BF16, beside=AttentionSpec(4, 2, 64, 64, 0.1)), backend)


def test_the_kernel_for_hopper(backend: FlashInferBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "architecture_of", lambda device: 90)
    check(make(SPEC, STEPS["decode"], 16, BF16, beside=SPEC), backend)
    assert CALLS == ["latent:fa3"]


def test_only_requests_that_meet_rows_are_planned(backend: FlashInferBackend, counts: dict[str, int]) -> None:
    """Of a step that is dealt out: its prompt is expanded, so that a plan for all of it would be for nothing."""
    check(make(SPEC, ((40, 1), (0, 200), (16, 2)), 16, BF16, beside=SPEC), backend)
    assert CALLS == ["latent:fa2:causal"] and counts["planned"] == 1


def test_decode_is_planned_before_the_model_runs(backend: FlashInferBackend, counts: dict[str, int]) -> None:
    case = make(SPEC, STEPS["decode"], 16, BF16, beside=SPEC)
    with ForwardContext(case.batch, case.pool, backend):
        assert counts["planned"] == 1, "three layers of one kind"


@pytest.mark.usefixtures("absorbed")
def test_log_sum_exps_are_natural(backend: FlashInferBackend) -> None:
    """In a call of the contract itself: no model asks a layer of latents for them."""
    case = make(SPEC, STEPS["mixed"], 16, BF16, beside=SPEC)
    case.pool.storage.nan_to_num_(0.0)
    tokens, heads = case.batch.num_tokens, SPEC.num_q_heads
    query = torch.randn(case.batch.num_rows, heads, 576).to(BF16)
    results = []
    for each in (backend, ReferenceBackend()):
        output, lse = torch.empty(case.batch.num_rows, heads, 512, dtype=BF16), torch.empty(heads, case.batch.num_rows).t()
        plan = each.plan(case.batch, case.pool)
        rows = case.rows.nan_to_num(0.0)[:, None]
        each.forward(plan, LAYER, SPEC, query, rows, rows[..., :512], output, save_kv_cache=True, lse_out=lse)
        results.append((output[:tokens], lse[:tokens]))
    torch.testing.assert_close(*(each[0].float() for each in results), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(*(each[1] for each in results), atol=2e-3, rtol=2e-3)


def test_a_graph_replays_other_steps(backend: FlashInferBackend) -> None:
    """What the first step launched, called again after later plans, gives the later steps' numbers."""
    graph, launch = backend.for_graph(max_requests=4, max_pages=64), None
    pool = make(SPEC, ((200, 1),) * 4, 16, BF16, beside=SPEC).pool
    for lengths in (((20, 1), (30, 1), (7, 1), (100, 1)), ((3, 1), (41, 1)), ((64, 1),)):
        case = make(SPEC, lengths, 16, BF16, padding=4 - len(lengths), beside=SPEC)
        pool.storage[: case.pool.storage.numel()].copy_(case.pool.storage)
        pool.storage[: pool.page_elements] = 0  # what the padded rows read
        case = replace(case, pool=pool)
        plan = graph.plan(case.batch, pool)
        if launch is None:
            launch = plan.launches[0]
        plan.launches[0] = launch
        output = torch.full((case.batch.num_rows, 4, 128), float("nan"), dtype=BF16)
        with ForwardContext(case.batch, pool, graph, plan=plan):
            rows = case.rows.nan_to_num(0.0)
            LATENT_ATTENTION(case.query.nan_to_num(0.0), rows[:, :512], rows[:, 512:], case.weight, case.weight, output, LAYER)
        assert (output[: len(lengths)].double() - case.expected).abs().max() <= 2e-2 * case.expected.abs().max()
    assert CALLS == ["latent:fa2"] * 3


def test_a_pool_that_32_bits_do_not_reach(backend: FlashInferBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(SPEC, STEPS["decode"], 16, BF16, beside=SPEC)
    monkeypatch.setattr(kinds, "MOST_ELEMENTS", case.pool.storage.numel() - 1)
    with pytest.raises(UnsupportedError, match=r"32-bit indices, and the KV pool has \d+ elements; .* \(6 pages of 16\): set num_pages"):
        backend.plan(case.batch, case.pool)
    monkeypatch.setattr(kinds, "MOST_ELEMENTS", case.pool.storage.numel())
    backend.plan(case.batch, case.pool)


@pytest.mark.usefixtures("absorbed")
def test_more_work_items_than_a_plan_has_memory_for(backend: FlashInferBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LATENT_ITEMS", 3)
    case = make(SPEC, ((0, 65),), 16, BF16, beside=SPEC)
    with pytest.raises(UnsupportedError, match="at most 3 work items for latents; 65 tokens of 4 heads in one step may be 4: lower"):
        case.run(backend)


def test_work_items_and_workspace() -> None:
    kind = Kind.of(spec_of("512 + 64", 128, PUBLISHED))
    assert latent_items(kind, [1] * 64, 132) == 64 + 132 and latent_items(kind, [100, 1], 132) == 101 + 132
    few = replace(kind, num_q_heads=16)
    assert latent_items(few, [1, 5], 132) == 1 + 2 + 132 and latent_items(few, [1, 8], 132) == 1 + 1 + 132
    assert choose.workspace_bytes(kind, 132) == 2 * 132 * 64 * (512 * 2 + 4) + 64


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"sliding_window": 5}, "latents with a window, softcap or sinks"), ({"has_sinks": True}, "latents with a window, softcap or sinks"),
     ({"qk_head_dim": 544, "rotated": 32}, "latents of 512 in rows of 544")],
)  # fmt: skip
def test_nothing_is_dropped_silently(changes: dict[str, int], words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"no kernel for {words}; take backend='auto'"):
        Kind.of(replace(SPEC, **changes))


def test_which_latents_it_takes() -> None:
    def reasons(kind: str, **changes: object) -> list[str]:
        spec = replace(spec_of(kind, 16, PUBLISHED), **changes)  # type: ignore[arg-type]
        return unmet(FlashInferBackend.capabilities, Problem(spec, BF16, BF16, 16, "cuda", 90))

    assert reasons("512 + 64") == reasons("512 + 64", gives_lse=True) == []
    assert reasons("256 + 64") == ["rank of the latent 256 is not in 512"]
    assert reasons("512 + 0") == ["rotated part of the latent 0 is not in 64"]
    assert reasons("512 + 64", sliding_window=9) == ["no multi-head latent attention together with sliding window"]
