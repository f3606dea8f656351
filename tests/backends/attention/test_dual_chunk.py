"""Dual chunk attention: three parts that are merged give one softmax over all keys, in every kind of step and every backend that has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged_attn.attn_ops.errors import ContextError
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.capabilities import Feature, Problem, unmet
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from paged_attn.backends.selection.registry import backend_class, backend_names
from tests.backends.dual_chunk_problems import CHUNK, STEPS, case_of, spec_of
from tests.backends.graph_steps import Spoiled
from tests.backends.problems import STRIDES

BACKENDS: dict[str, AttentionBackend] = {"reference": ReferenceBackend(), "torch_native": TorchNativeBackend()}
if not torch.cuda.is_available():  # Triton's interpreter runs where there is no GPU; tests/gpu has the real thing
    pytest.importorskip("triton")
    from paged_attn.backends.attention.triton.backend import TritonBackend

    BACKENDS["triton"] = TritonBackend()
interpreted = pytest.mark.skipif("triton" not in BACKENDS, reason="Triton's interpreter runs where there is no GPU")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_step(backend: str, step: str) -> None:
    case_of(STEPS[step], page_size=4, extra_rows=3).assert_right(BACKENDS[backend])


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("number", range(4))
def test_sizes_pages_and_strides(backend: str, number: int) -> None:
    chunk, page_size = (2, 5, 16, 33)[number], (1, 3, 16, 64)[number]
    spec = spec_of(chunk, num_q_heads=6, num_kv_heads=2, qk_head_dim=12, v_head_dim=5)
    case_of(((30, 1), (7, 3), (64, 11)), spec, page_size=page_size, strides=STRIDES[number]).assert_right(BACKENDS[backend])


@interpreted
def test_cuts_at_fixed_keys() -> None:
    case_of(STEPS["mixed"], page_size=4, extra_rows=3).assert_right(TritonBackend(deterministic=True))


@interpreted
def test_16_bit_type() -> None:
    case_of(STEPS["mixed"], page_size=4, dtype=torch.float16).assert_right(BACKENDS["triton"])


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_each_of_the_three_queries_counts(wrong: int) -> None:
    case = case_of(STEPS["mixed"], page_size=4)
    queries = [case.step.query, *case.others]
    queries[wrong] = queries[wrong] + 1.0
    case = replace(case, step=replace(case.step, query=queries[0]), others=(queries[1], queries[2]))
    with pytest.raises(AssertionError, match="not close"):
        case.assert_right(BACKENDS["torch_native"])


@interpreted
@pytest.mark.usefixtures("exact_products")
def test_a_row_is_bitwise_the_same_however_its_prompt_is_cut() -> None:
    """Alone in one step, and as the last tokens beside others: with one part, with three."""
    backend, length = TritonBackend(deterministic=True), 3 * CHUNK + 2
    whole = case_of([(0, length)], page_size=4, dtype=torch.float16)
    expected = whole.run(backend)[-1]
    for new in (1, 2 * CHUNK):
        case = case_of([(9, 1), (length - new, new)], page_size=4, dtype=torch.float16)
        rows = case.step.rows(1)
        for mine, theirs in zip((case.step.query, *case.others), (whole.step.query, *whole.others), strict=True):
            mine[rows] = theirs[-new:]
        dense = zip(
            (case.step.key, case.step.value),
            (whole.step.key, whole.step.value),
            (case.step.pool.key(1), case.step.pool.value(1)),
            strict=True,
        )
        for mine, theirs, pool in dense:
            mine[rows] = theirs[-new:]
            for position in range(length - new):
                pool[case.step.batch.page_table[1, position // 4], position % 4] = theirs[position]
        assert torch.equal(case.run(backend)[rows][-1], expected), f"{new} new tokens"


@interpreted
def test_a_captured_step_serves_all_lengths() -> None:
    """What was planned for the longest contexts runs shorter ones from the tensors alone, as a replayed graph does."""
    case, backend = case_of(STEPS["decode"], page_size=4), BACKENDS["triton"]
    batch = case.step.batch
    planned = backend.plan(replace(batch, seq_lens_host=(64,) * batch.num_requests), case.step.pool)
    planned.batch = replace(batch, seq_lens_host=Spoiled((64,) * batch.num_requests))
    backend.plan_in_graph(planned)
    output = case.run(backend, planned, planned.batch)
    torch.testing.assert_close(output.double(), case.expected, atol=1e-5, rtol=1e-5)


def test_others_refuse_by_what_they_state() -> None:
    device = {"device": "cuda", "architecture": 90}
    problem = Problem(spec_of(qk_head_dim=128, v_head_dim=128), torch.bfloat16, torch.bfloat16, 64, **device)
    assert problem.features == {Feature.DUAL_CHUNK}
    reasons = {name: unmet(backend_class(name).capabilities, problem) for name in backend_names()}
    assert {name for name, why in reasons.items() if not why} == {"reference", "torch_native", "triton"}
    unable = {name for name, why in reasons.items() if "no dual chunk attention" in why}
    assert {"fa3", "flashinfer", "flex", "flash_attn"} < unable and "dual_chunk_flash_attn" not in unable


def test_a_pool_of_other_layers_is_refused() -> None:
    case = case_of(STEPS["decode"], page_size=4)
    case.step.pool.layers = tuple(spec.parts[0] for spec in case.step.pool.layers)
    with pytest.raises(ContextError, match="no dual chunk attention"):
        case.run(BACKENDS["torch_native"])


def test_what_a_spec_may_say() -> None:
    spec = spec_of(24, kv_layer=0)
    assert spec.describe() == "4 heads over 2 KV, dim 8, causal, dual chunks of 24, scale 0.41"
    assert [part.describe() for part in spec.parts[1:]] == [
        f"4 heads over 2 KV, dim 8, causal, chunk 24, {part} chunks, log-sum-exp, scale 0.41" for part in ("successive", "inter")
    ]
    assert spec == spec_of(24, kv_layer=0) != spec_of(25, kv_layer=0) and hash(spec) == hash(spec_of(24, kv_layer=0))
    for wrong in ({"chunk": 1}, {"softcap": 3.0}, {"causal": False}, {"chunk_part": "inter"}, {"sliding_window": 4}):
        with pytest.raises(ValueError, match="chunk"):
            spec_of(**{"chunk": 24, **wrong})
