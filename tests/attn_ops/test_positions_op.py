"""The op that gives the batch's positions: schema, opcheck, values, padding, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.positions import BATCH_POSITIONS
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from paged_attn.capture.split.split_ops import split_ops
from tests.backends.problems import spec_of

REQUESTS = {
    "ragged": ([BatchRequest([5, 6, 7], [1]), BatchRequest([8], [2, 3], 5), BatchRequest([1, 2], [4])], [0, 1, 2, 5, 0, 1]),
    "one token": ([BatchRequest([8], [2, 3], 5)], [5, 0]),
}


def context(name: str) -> ForwardContext:
    pool = KVPool([replace(spec_of("plain"), kv_layer=0)], 6, 4, torch.float32)
    return ForwardContext(Batch.build(REQUESTS[name][0], 4), pool, TorchNativeBackend())


def test_schema_mutates_its_output_and_the_op_splits_graphs() -> None:
    assert str(BATCH_POSITIONS._schema) == "paged_attn::batch_positions_with_output(Tensor(a!) output) -> ()"
    assert BATCH_POSITIONS is torch.ops.paged_attn.batch_positions_with_output.default
    assert BATCH_POSITIONS in split_ops()


@pytest.mark.parametrize("shape", ["[T]", "[1, T]"])
@pytest.mark.parametrize("name", REQUESTS)
def test_positions_of_every_request_and_zero_in_padding(name: str, shape: str) -> None:
    expected = torch.tensor(REQUESTS[name][1])
    output = torch.full_like(expected, -7)
    with context(name) as active:
        active.batch.positions[active.batch.num_tokens :] = 99  # the op itself clears padding
        BATCH_POSITIONS(output if shape == "[T]" else output[None])
    assert output.tolist() == expected.tolist()


def test_opcheck() -> None:
    with context("ragged"):
        results = torch.library.opcheck(BATCH_POSITIONS, (torch.zeros(6, dtype=torch.int64),))
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


def test_outside_any_context() -> None:
    with pytest.raises(ContextError, match="outside any forward context; wrap the call"):
        BATCH_POSITIONS(torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (torch.zeros(5, dtype=torch.int64), "got 5 rows but the forward context's batch has 6"),
        (torch.zeros(6, dtype=torch.int32), r"\[6\] of torch.int32; allowed is \[T\] or \[1, T\] of torch.int64"),
        (torch.zeros(2, 6, dtype=torch.int64), r"\[2, 6\] of torch.int64; allowed"),
        (torch.zeros((), dtype=torch.int64), r"\[\] of torch.int64; allowed"),
    ],
)
def test_an_output_of_another_form(output: torch.Tensor, words: str) -> None:
    before = output.clone()
    with context("ragged"), pytest.raises(ContextError, match=words):
        BATCH_POSITIONS(output)
    assert torch.equal(output, before)


def test_on_meta_tensors_it_does_nothing() -> None:
    BATCH_POSITIONS(torch.empty(4, dtype=torch.int64, device="meta"))
