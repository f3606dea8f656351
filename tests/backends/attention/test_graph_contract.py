"""What a captured graph needs of a backend: other lengths, pages and numbers of requests in the same buffers, with the same plan."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.batch.step_buffers import StepShape
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.capabilities import Feature, GraphSupport, Problem, unmet
from paged_attn.backends.attention.hybrid import HybridPlan, hybrid_of
from paged_attn.backends.attention.reference import ReferenceBackend
from tests.backends.fake_backends import PLAIN, fake
from tests.backends.fake_machines import MACHINES
from tests.backends.graph_steps import GraphSteps, plan_numbers
from tests.backends.problems import make, spec_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with stand-ins for a GPU's packages: tests/gpu has the real ones")
FP16 = torch.float16
ON = {"fa3": "sgl_kernel", "flash_attn": "flash_attn", "flashinfer": "flashinfer", "trtllm_mha": "flashinfer", "triton": "none"}
NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(package) is not None, reason=f"the real {package} is installed"))
    for name, package in ON.items()
]
PAGE = {"flash_attn": 256}
STEPS = [(120, 63, 64, 15), (1,), (7, 90), (2, 1, 3, 1)]  # many pages first: their ids stay in the page table


@pytest.fixture(params=NAMES)
def backend(request) -> Iterator[AttentionBackend]:
    with MACHINES[request.param]() as made:
        yield made


def again(forward):
    """A stand-in for a graph: run once to record, and again for each replay."""
    forward()
    return forward


def steps_of(backend: AttentionBackend, feature: str = "plain", **options) -> GraphSteps:
    page_size = options.pop("page_size", PAGE.get(backend.name, 16))
    options = {"width": max(2, 256 // page_size), "dtype": FP16, **options}
    return GraphSteps(backend, spec_of(feature, dim=64), again, page_size=page_size, **options)


@pytest.mark.parametrize("feature", ["plain", "window", "sinks", "softcap", "chunk", "alibi", "gqa_7", "bias_by_key"])
def test_a_graph_replays_other_steps(backend, feature):
    lse = Feature.LSE in backend.capabilities.features
    problem = Problem(spec_of(feature, dim=64), FP16, FP16, PAGE.get(backend.name, 16), "cuda", 90)
    if reasons := unmet(backend.capabilities, replace(problem, phases=frozenset({"decode"}))):
        pytest.skip("; ".join(reasons))
    steps = steps_of(backend, feature, lse=lse)
    for seed, cached in enumerate(STEPS):
        steps.check(cached, seed=seed)


@pytest.mark.parametrize("page_size", [1, 64, 256])
@pytest.mark.parametrize("layout", ["descending", "shared"])
def test_page_sizes_and_layouts(backend, page_size, layout):
    if page_size not in backend.capabilities.page_sizes:
        pytest.skip(f"page size {page_size}")
    steps = steps_of(backend, page_size=page_size, requests=3)
    for cached in ((130, 129, 128), (64, 63), (200, 199, 5)):
        steps.check(cached, layout=layout)


def test_every_graph_of_a_backend_is_right_for_every_step(backend):
    """Which one is taken is a matter of speed alone."""
    steps = steps_of(backend)
    for variant in range(len(steps.graphs)):
        for cached in ((250, 240, 230, 220), (1, 2)):
            steps.check(cached, variant)


def test_plans_take_no_host_length(backend):
    """Neither the longest nor the sum: what was captured at one length holds for all."""
    steps = steps_of(backend)
    last = steps.source.graph_lengths(steps.requests, steps.longest, steps.pool)[-1]
    assert last == steps.longest
    assert plan_numbers(steps.planned(last)) == plan_numbers(steps.planned(last - 3)) == plan_numbers(steps.planned(last - 40))


def test_numbers_of_a_plan_show_a_host_length():
    """Negative control: Triton's tilings follow the number of keys."""
    with MACHINES["triton"]() as backend:
        steps = steps_of(backend)
        assert plan_numbers(steps.planned(2)) != plan_numbers(steps.planned(steps.longest))


def test_a_page_table_that_is_copied_is_copied_in_the_graph():
    with MACHINES["trtllm_mha"]() as backend:
        steps = steps_of(backend, requests=2)
        batch, wide = steps.build([]), steps.buffers.page_tables[0].new_zeros(2, 40)
        plan = backend.plan(replace(batch, page_table=wide[:, :7]), steps.pool)
        wide[:, :7] = torch.arange(14).view(2, 7)
        backend.plan_in_graph(plan)
        assert plan.page_table.is_contiguous() and torch.equal(plan.page_table, wide[:, :7])


def test_what_a_graph_may_hold():
    spec = {"extend": GraphSupport.ALWAYS, "decode": GraphSupport.UNIFORM_DECODE}
    some = fake("some", replace(PLAIN, graphs=spec))()
    assert some.graph_support() is GraphSupport.UNIFORM_DECODE
    assert ReferenceBackend().graph_support() is GraphSupport.NEVER
    assert some.for_graph(4, 8) is some
    assert some.graph_lengths(4, 77, make([(1, 1)]).pool) == (77,) and some.graph_variant(make([(1, 1)]).batch, make([(1, 1)]).pool) == 0


def test_two_backends_answer_for_their_phases():
    first = fake("first", replace(PLAIN, graphs={"extend": GraphSupport.ALWAYS, "decode": GraphSupport.NEVER}))()
    asked = []

    class Second(fake("second", replace(PLAIN, graphs={"extend": GraphSupport.NEVER, "decode": GraphSupport.UNIFORM_DECODE}))):
        def for_graph(self, *sizes):
            asked.append(sizes)
            return first

        def graph_lengths(self, requests, max_context, pool):
            return (requests, max_context)

        def graph_variant(self, batch, pool):
            return 1

        def refresh(self, plan, batch):
            asked.append((plan, batch))

    second = Second()
    hybrid, case = hybrid_of(first, second), make([(3, 1)])
    assert hybrid.graph_support() is GraphSupport.UNIFORM_DECODE and hybrid_of(second, first).graph_support() is GraphSupport.NEVER
    assert hybrid.for_graph(4, 9) is first
    assert hybrid.graph_lengths(3, 50, case.pool) == (3, 50) and hybrid.graph_variant(case.batch, case.pool) == 1
    plan = hybrid.plan(case.batch, case.pool)
    assert isinstance(plan, HybridPlan)
    hybrid.refresh(plan, case.batch)
    assert asked == [(4, 9), (plan.plan, case.batch)]


def test_deterministic_triton_has_no_graphs():
    pytest.importorskip("triton")
    from paged_attn.backends.attention.triton.backend import TritonBackend

    assert TritonBackend(deterministic=True).graph_support() is GraphSupport.NEVER
    assert TritonBackend().graph_support() is GraphSupport.ALWAYS


def kinds(count: int) -> st.SearchStrategy[list[AttentionSpec]]:
    heads = st.sampled_from([(8, 8), (8, 2), (8, 1), (16, 4)])
    specs = st.builds(lambda h, dim: AttentionSpec(*h, dim, dim, 0.1), heads, st.sampled_from([64, 128, 256]))
    return st.lists(specs, min_size=1, max_size=count).map(lambda found: [replace(s, kv_layer=i) for i, s in enumerate(found)])


@settings(max_examples=150, deadline=None)
@given(
    layers=kinds(3), dtype=st.sampled_from([torch.float32, FP16]), requests=st.sampled_from([1, 2, 3, 8, 64]),
    cached=st.lists(st.integers(1, 400), min_size=1, max_size=8), width=st.sampled_from([30, 401, 1000]),
    shortest=st.sampled_from([1, 1, 60]),
)  # fmt: skip
def test_tritons_graphs_are_planned_as_the_steps_that_they_serve(layers, dtype, requests, cached, width, shortest):
    """`shortest`: contexts below which a second graph is not worth it; the interpreter's machine is too small for the true one."""
    pytest.importorskip("triton")
    from paged_attn.backends.attention.triton.backend import TritonBackend
    from paged_attn.backends.attention.triton.tiling import few_keys, one_block_keys
    from paged_attn.backends.machine import machine_of

    backend, pool = TritonBackend(), KVPool(layers, 2, 1, dtype)
    cached = [min(c, width - 1) for c in cached[:requests]]
    reals = [BatchRequest([0], [1] * (c + 1), c) for c in cached]
    batch = Batch.build(reals, 1, shape=StepShape(requests, requests, requests))
    with mock.patch("paged_attn.backends.attention.triton.backend.SHORTEST_SMALL", shortest):
        lengths, variant = backend.graph_lengths(requests, width, pool), backend.graph_variant(batch, pool)
    assert len(lengths) in (1, 2, 3)[: 3 if requests == 1 else 2] and lengths[-1] == width and min(lengths) >= 1 and variant < len(lengths)
    assert len(lengths) == 1 or lengths[0] < width
    captured = backend.plan(replace(batch, seq_lens_host=(lengths[variant],) * requests), pool)
    of_graph, of_step = (
        [[plan.shares[i].kind.tiling for i in plan.by_layer[layer]["intra"]] for layer in range(len(layers))]
        for plan in (captured, backend.plan(batch, pool))
    )
    machine = machine_of(pool.device)
    alone = {one_block_keys(spec, machine) for spec in layers} - {0}
    thresholds = {"few": {few_keys(spec, dtype, machine) for spec in layers}, "alone": alone}
    for graph, step in zip(of_graph, of_step, strict=True):
        if graph != step:  # between two kinds' thresholds the graph of larger steps serves both
            kind = "few" if graph[0].item_cost > 0 else "alone"
            assert (step[0].item_cost == 0) if kind == "few" else (step[0].first_block_early > graph[0].first_block_early)
            one_graph = min(thresholds[kind]) // requests < shortest
            assert len(thresholds[kind]) > 1 or one_graph
            assert variant > 0 or one_graph
