"""A step never waits for the device: building the batch, planning, and attention of every backend on this GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from tests.backends.fitting import JIT, instance, problem_of, reasons_against, usable_names
from tests.backends.problems import LAYER, make, new_output, spec_of

STEPS = {"decode": ((70, 1), (15, 1), (16, 1)), "mixed": ((17, 1), (0, 1), (6, 5), (70, 1), (0, 9))}
NAMES = [pytest.param(name, marks=[pytest.mark.jit] * (name in JIT)) for name in usable_names("cuda") or ["none"]]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def requests_of(lengths: tuple[tuple[int, int], ...], page_size: int, first: int = 1) -> list[BatchRequest]:
    requests = []
    for cached, new in lengths:
        count = -(-(cached + new) // page_size)
        requests.append(BatchRequest(list(range(new)), list(range(first, first + count)), cached))
        first += count
    return requests


@pytest.mark.parametrize("feature", ["plain", "window"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", NAMES)
def test_a_step(name: str, step: str, feature: str) -> None:
    for page_size in (16, 256):
        case = make(STEPS[step], spec_of(feature, dim=64), page_size=page_size, dtype=torch.bfloat16)
        if not (reasons := reasons_against(name, problem_of(case, torch.device("cuda")))):
            break
    else:
        pytest.skip("; ".join(reasons))
    case = case.to("cuda")
    requests, output = requests_of(STEPS[step], page_size), new_output(case)

    def run() -> None:
        batch = Batch.build(requests, page_size, "cuda")
        with ForwardContext(batch, case.pool, instance(name)):
            UNIFIED_ATTENTION(case.query, case.key, case.value, output, LAYER, True)

    for _ in range(2):
        run()  # compiles, and makes what is kept
    with waiting_is_an_error():
        run()
    torch.cuda.synchronize()


def test_waiting_is_seen() -> None:
    """Negative control."""
    tensor = torch.ones(2, device="cuda")
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        tensor.sum().item()


def test_a_batch_on_the_gpu_is_the_batch_on_the_cpu() -> None:
    requests = requests_of(STEPS["mixed"], 16)
    expected, batch = Batch.build(requests, 16), Batch.build(requests, 16, "cuda")
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            found = getattr(batch, name)
            assert found.is_cuda and found.dtype == value.dtype and torch.equal(found.cpu(), value), name
            assert found.data_ptr() % 16 == 0
        elif name != "page_table_host":
            assert getattr(batch, name) == value, name
    assert (batch.page_table_host == expected.page_table_host).all()


def test_batches_built_ahead_of_the_gpu_do_not_overwrite_each_other() -> None:
    """The GPU is busy while ten batches are built and forgotten: their pinned memory must outlive the copies."""
    builds = [requests_of(((100 + i, 1), (200, 1)), 16, first=1 + 100 * i) for i in range(10)]
    Batch.build(builds[0], 16, "cuda")
    with waiting_is_an_error():
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        tables = [Batch.build(requests, 16, "cuda").page_table for requests in builds]
    for requests, table in zip(builds, tables, strict=True):
        assert torch.equal(table.cpu(), Batch.build(requests, 16).page_table)
