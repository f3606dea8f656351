"""One layer's decode in a captured graph, for every backend here that captures: other steps in the same buffers, against the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from paged_attn.backends.attention.capabilities import GraphSupport
from paged_attn.backends.selection.registry import backend_class
from tests.backends.fitting import JIT, instance, problem_of, reasons_against, usable_names
from tests.backends.graph_steps import GraphSteps
from tests.backends.problems import make, spec_of
from tests.gpu.test_no_sync import waiting_is_an_error

BF16 = torch.bfloat16
FEATURES = ("plain", "window", "sinks", "softcap", "chunk", "alibi", "gqa_7_sinks", "bias_by_key", "all")
QUICK = ("plain", "window", "descending", "shared")  # of backends marked jit; others are slow
STEPS = ((1500, 63, 64, 15), (1,), (7, 900), (30, 31, 1270), (2, 1, 3, 1))  # many pages first: their ids stay in the page table
CAPTURING = [name for name in usable_names("cuda") if backend_class(name).capabilities.graphs["decode"] is not GraphSupport.NEVER]


def named(*values: str) -> list[object]:
    """Backend and value; those that compile for long are marked."""

    def marks(name: str, value: str) -> list[pytest.MarkDecorator]:
        return [pytest.mark.jit, *([] if value in QUICK else [pytest.mark.slow])] if name in JIT else []

    return [pytest.param(name, value, marks=marks(name, value)) for name in CAPTURING or ["none"] for value in values]


def on_gpu(forward: Callable[[], None]) -> Callable[[], None]:
    """Record a graph, after a run that compiles."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph.replay


def steps_of(name: str, feature: str, *, requests: int = 4, page_sizes: tuple[int, ...] = (16, 256), lse: bool = False) -> GraphSteps:
    """Skips with the backend's own reasons if no page size fits."""
    spec = spec_of(feature, dim=64)
    for page_size in page_sizes:
        case = make([(1, 1)], spec, page_size=page_size, dtype=BF16)
        if not (reasons := reasons_against(name, problem_of(case, torch.device("cuda"), lse=lse))):
            width = -(-1600 // page_size)
            return GraphSteps(instance(name), spec, on_gpu, requests=requests, width=width, page_size=page_size, dtype=BF16,
                              device="cuda", lse=lse)  # fmt: skip
    pytest.skip("; ".join(reasons))


@pytest.mark.parametrize(("name", "feature"), named(*FEATURES))
def test_a_graph_replays_other_steps(name: str, feature: str) -> None:
    steps = steps_of(name, feature)
    for seed, cached in enumerate(STEPS):
        steps.check(cached, seed=seed)


@pytest.mark.parametrize(("name", "feature"), named("plain", "window", "sinks"))
def test_log_sum_exp(name: str, feature: str) -> None:
    steps = steps_of(name, feature, lse=True)
    for seed, cached in enumerate(STEPS[:3]):
        steps.check(cached, seed=seed)


@pytest.mark.parametrize(("name", "layout"), named("descending", "shared"))
@pytest.mark.parametrize("page_size", [1, 64, 128, 256])
def test_page_sizes_and_layouts(name: str, layout: str, page_size: int) -> None:
    steps = steps_of(name, "plain", page_sizes=(page_size,), requests=3)
    for cached in ((1300, 1299, 128), (64, 63), (200, 199, 5)):
        steps.check(cached, layout=layout)


@pytest.mark.parametrize(("name", "feature"), named("plain"))
@pytest.mark.parametrize("requests", [2, 3, 8, 33])
def test_sizes(name: str, feature: str, requests: int) -> None:
    steps = steps_of(name, feature, requests=requests)
    for count in {requests, -(-requests // 2), 1}:
        steps.check([40 * (i % 7) + 3 for i in range(count)], seed=count)


@pytest.mark.parametrize(("name", "feature"), named("plain"))
def test_both_graphs_of_few_and_of_many_keys(name: str, feature: str) -> None:
    """Triton has two; each is right for any step, and is chosen by the keys of all requests."""
    if name != "triton":
        pytest.skip("has one graph")
    spec = dataclasses.replace(spec_of(feature, dim=64), num_q_heads=16, num_kv_heads=16)
    steps = GraphSteps(instance(name), spec, on_gpu, width=512, page_size=16, dtype=BF16, device="cuda")
    few, longest = instance(name).graph_lengths(4, steps.longest, steps.pool)
    assert longest == steps.longest and 4 * (few + 1) <= longest
    for cached, expected in (((few - 1,) * 4, 0), ((few - 1, few - 1, few - 1, few + 8), 1), ((few,), 0), ((longest - 1, 9), 1)):
        batch = steps.build(steps.load(steps.case(cached)))
        assert instance(name).graph_variant(batch, steps.pool) == expected
        for variant in (0, 1):
            steps.check(cached, variant)


@pytest.mark.parametrize(("name", "feature"), named("plain", "window"))
def test_a_replay_does_not_wait(name: str, feature: str) -> None:
    steps = steps_of(name, feature)
    for cached in STEPS[:2]:
        steps.check(cached)
    requests = steps.load(steps.case((7, 900)))
    with waiting_is_an_error():
        steps.step(requests)
        steps.step(requests)
    torch.cuda.synchronize()
    steps.check((7, 900))


def test_some_backend_captures() -> None:
    """So that skips above cannot hide everything."""
    assert "triton" in CAPTURING
