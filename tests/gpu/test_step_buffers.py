"""Steps in fixed buffers on a GPU: built without waiting, at the same addresses, and each in order after what reads the one before."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.batch.step_buffers import StepBuffers, StepShape
from paged_attn.backends.host_memory.held import TOGETHER
from paged_attn.engine.steps.future_tokens import FutureTokens, future_token
from tests.gpu.test_no_sync import requests_of, waiting_is_an_error

PAGE_SIZE = 16

STEPS = {
    "decode": (StepShape(8, 8, 8), (((70, 1), (15, 1)), ((100, 1), (31, 1), (16, 1), (1, 1)), ())),
    "mixed": (StepShape(32, 8), (((17, 1), (0, 9)), ((6, 5), (70, 1), (0, 9)), ((0, 1),))),
}


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("kind", STEPS)
def test_steps_built_ahead_of_the_gpu_are_read_in_order(kind: str, fetched: bool) -> None:
    shape, steps = STEPS[kind]
    memory = StepBuffers(64, 16, 8, 16, "cuda", fetch=FutureTokens(8, torch.device("cuda")).fetch() if fetched else None)
    builds = [requests_of(lengths, PAGE_SIZE, first=1 + 20 * i) for i, lengths in enumerate(steps)]
    Batch.build(builds[0], PAGE_SIZE, shape=shape, buffers=memory)
    made, read = [], []
    with waiting_is_an_error():
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        for requests in builds * 2 * TOGETHER:
            batch = Batch.build(requests, PAGE_SIZE, shape=shape, buffers=memory)
            tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
            made.append({name: value.data_ptr() for name, value in tensors.items()})
            read.append(dataclasses.replace(batch, **{name: value.clone() for name, value in tensors.items()}))
    assert all(one == made[0] for one in made)
    assert all(address % 128 == 0 for address in made[0].values())
    for requests, batch in zip(builds * 2 * TOGETHER, read, strict=True):
        expected = Batch.build(requests, PAGE_SIZE, shape=shape)
        width = expected.page_table.shape[1]
        for name, value in vars(expected).items():
            if isinstance(value, torch.Tensor):
                found = getattr(batch, name)
                assert found.is_cuda and batch.knows_tokens is fetched
                assert torch.equal((found[:, :width] if name == "page_table" else found).cpu(), value), name


def test_tokens_of_the_step_before_are_in_place() -> None:
    """Stored right before, by a kernel that is still running while the step's numbers are read."""
    future = FutureTokens(8, torch.device("cuda"))
    memory, shape = StepBuffers(8, 8, 8, 8, "cuda", fetch=future.fetch()), StepShape(4, 4, 4)
    requests = [BatchRequest([token], [1 + index], 3) for index, token in enumerate((future_token(2), 7, future_token(0)))]
    for round_ in range(20):
        torch.cuda._sleep(1_000_000)
        future.store(torch.arange(8, device="cuda") + 100 * round_)
        batch = Batch.build(requests, PAGE_SIZE, shape=shape, buffers=memory)
        assert batch.input_ids.tolist() == [100 * round_ + 2, 7, 100 * round_, 0]


def test_a_captured_graph_reads_the_step_that_was_built_last() -> None:
    memory, shape = StepBuffers(8, 8, 4, 8, "cuda"), StepShape(4, 4, 4)
    batch = Batch.build([], PAGE_SIZE, shape=shape, buffers=memory)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = batch.slots + 1000 * batch.seq_lens + 1_000_000 * batch.page_table[:, 0]
    for index, lengths in enumerate((((20, 1), (7, 1)), ((40, 1), (3, 1), (16, 1), (9, 1)))):
        requests = requests_of(lengths, PAGE_SIZE, first=1 + 3 * index)
        Batch.build(requests, PAGE_SIZE, shape=shape, buffers=memory)
        graph.replay()
        plain = Batch.build(requests, PAGE_SIZE, shape=shape)
        assert torch.equal(result.cpu(), plain.slots + 1000 * plain.seq_lens + 1_000_000 * plain.page_table[:, 0])
