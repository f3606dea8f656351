"""One thread per test process: two xdist workers with two OpenMP threads each on two cores spin against each other.

Without a GPU, Triton kernels run in Triton's interpreter; it looks at the variable when a kernel is defined.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator

import pytest
import torch

from tests.quick import function_and_case, slow_tests

_STARTED = time.perf_counter()
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch._dynamo.config.fake_tensor_cache_enabled = False  # models of two layers are traced a fifth faster without; those of many are not
os.environ["PAGED_ATTN_TUNED"] = "none"  # what was measured on this machine must not change what a test selects
os.environ["PAGED_ATTN_CACHE"] = "none"  # nor what another test compiled what is compiled


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
    return str(tmp_path_factory.mktemp("graphs"))


@pytest.fixture
def graphs_on_disk(folder_of_graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that make one model's engine several times: it is traced once. The second engine runs the graph that the first one kept."""
    monkeypatch.setenv("PAGED_ATTN_CACHE", folder_of_graphs)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m "not slow"` is `make test`: see tests/quick.py."""
    slow = slow_tests()
    for item in items:
        function, case = function_and_case(item.nodeid)
        if function in slow and (slow[function] is None or slow[function] != case):
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    budget = os.environ.get("PAGED_ATTN_TEST_SECONDS")
    if budget is not None:
        seconds = time.perf_counter() - _STARTED
        words = "within" if seconds <= float(budget) else "over"
        terminalreporter.write_line(f"{seconds:.0f} s, {words} the {budget} s that `make test` is to take on two idle cores")
