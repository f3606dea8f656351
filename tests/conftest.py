"""One thread per test process: two xdist workers with two OpenMP threads each on two cores spin against each other.

Without a GPU, Triton kernels run in Triton's interpreter; it looks at the variable when a kernel is defined.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from tests.order import sort_by_seconds
from tests.overlap import ROOT, runs_both_ways, slow_in_overlap
from tests.quick import function_and_case, slow_tests
from tests.share import in_share

_STARTED = time.perf_counter()
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch._dynamo.config.fake_tensor_cache_enabled = False  # models of two layers are traced a fifth faster without; those of many are not
os.environ["PAGED_ATTN_TUNED"] = "none"  # what was measured on this machine must not change what a test selects
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts pytest with `&` has it ignored, and tests of Ctrl-C need it
os.environ["PAGED_ATTN_CACHE"] = "none"  # nor may what is in this user's cache; tests share graphs of their own, see below
# Where a trace is what is tested, or what the passes make of one, every test traces anew: a graph from disk has no values of nodes.
TRACING_ROOMS = ("capture", "check", "engine.tracing", "graph_cache", "passes", "recurrent")
TRACING_MODULES = (
    "backends.selection.test_experts", "cli.test_ranks", "engine.runners.test_traced_runner", "test_drop_in", "test_expert_parallel",
    "test_explain", "test_inductor", "test_tensor_parallel",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def frozen_afterwards() -> Iterator[None]:
    """What a module of tests leaves behind is not looked through again whenever something collects garbage: engines do, before a capture,
    and Dynamo keeps so much of every trace that a collection would soon take a second."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers_in_every_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """A request without a seed samples what it sampled in the last run of this test: what fails once, fails again."""
    from paged_attn.engine.sampling import sampling_state

    numbers = random.Random(request.node.nodeid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_state, "fresh_seed", lambda: numbers.getrandbits(64))
        yield


@pytest.fixture(scope="session")
def folder_of_graphs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all processes of a run; `.ci/run` names one for all its runs."""
    own = tmp_path_factory.getbasetemp()
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    return os.environ.get("PAGED_ATTN_TEST_GRAPHS") or str(folder / "graphs")


@pytest.fixture(autouse=True, scope="module")
def one_trace_a_model(request: pytest.FixtureRequest, folder_of_graphs: str) -> Iterator[None]:
    """A model that any test has traced is not traced again: an engine that starts on the graph that another kept takes an eighth.

    transformers' table of attentions, where `patch` leaves its own, is evidence: it is there from the start, so that tests that come after
    a patched model find what those before one have kept.
    """
    from paged_attn.hf.patch import register_attention

    register_attention()
    module = request.module.__name__.removeprefix("tests.")
    with pytest.MonkeyPatch.context() as patch:
        if not module.startswith(tuple(f"{room}." for room in TRACING_ROOMS)) and module not in TRACING_MODULES:
            patch.setenv("PAGED_ATTN_CACHE", folder_of_graphs)
        yield


@pytest.fixture
def traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of what a trace says or costs."""
    monkeypatch.setenv("PAGED_ATTN_CACHE", "none")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist would order files by how many tests they have: see tests/order.py


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """`-m "not slow"` is `make test`: see tests/quick.py. `make overlap` runs what its variable changes: see tests/overlap.py."""
    wanted = in_share(os.environ.get("PAGED_ATTN_TEST_SHARE", ""))
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item.nodeid)])
    items[:] = [item for item in items if wanted(item.nodeid)]
    slow = slow_tests()
    if "PAGED_ATTN_TEST_OVERLAP" in os.environ:
        modules = {item: ".".join(item.path.relative_to(ROOT).with_suffix("").parts) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not runs_both_ways(modules[item])])
        items[:] = [item for item in items if runs_both_ways(modules[item])]
        slow = slow_in_overlap()
    for item in items:
        function, case = function_and_case(item.nodeid)
        if function in slow and (slow[function] is None or slow[function] != case):
            item.add_marker("slow")
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        sort_by_seconds(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    budget = os.environ.get("PAGED_ATTN_TEST_SECONDS")
    if budget is not None:
        seconds = time.perf_counter() - _STARTED
        words = "within" if seconds <= float(budget) else "over"
        terminalreporter.write_line(f"{seconds:.0f} s, {words} the {budget} s that `make test` is to take on two idle cores")
