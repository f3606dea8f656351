"""`request_lengths_with_output`: what each row's request has, whatever part of it a step computes."""

from __future__ import annotations

import pytest
import torch

from paged_attn import Batch, BatchRequest, KVPool
from paged_attn.attn_ops.batch.step_buffers import StepShape
from paged_attn.attn_ops.context import ForwardContext, NoAttention
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.ops.positions import REQUEST_LENGTHS

CHUNK = BatchRequest([5, 6, 7], [1, 2], 4, 0, length=20)
DECODE = BatchRequest([9], [3, 4], 6)


def lengths_in(batch: Batch) -> list[int]:
    output, pool = torch.full((batch.num_rows,), -1), KVPool((), 2, 4, torch.float32)
    with ForwardContext(batch, pool, NoAttention()):
        REQUEST_LENGTHS(batch.positions[None], output)
    return output.tolist()


def test_of_chunks_and_decode_rows_and_padding_as_the_last_request() -> None:
    assert lengths_in(Batch.build([CHUNK, DECODE], 4)) == [20, 20, 20, 7]
    assert lengths_in(Batch.build([DECODE, CHUNK], 4, shape=StepShape(6, 2))) == [7, 20, 20, 20, 20, 20]
    assert lengths_in(Batch.build([DECODE], 4)) == [7, 7]


def test_of_a_decode_step_with_dummies() -> None:
    batch = Batch.build([DECODE, DECODE._replace(length=9)], 4, shape=StepShape(4, 4, 4))
    assert lengths_in(batch) == [7, 9, 1, 1]


def test_of_no_request() -> None:
    assert lengths_in(Batch.build([], 4)) == [0, 0]


@pytest.mark.parametrize("shape", [(1, 7), (3, 1, 7)])
def test_without_a_context_the_call_is_one_request(shape: tuple[int, ...]) -> None:
    output = torch.empty(7, dtype=torch.int64)
    REQUEST_LENGTHS(torch.arange(7).expand(shape), output)
    assert output.tolist() == [7] * 7


def test_another_number_of_rows_or_type_is_refused() -> None:
    batch, pool = Batch.build([CHUNK], 4), KVPool((), 2, 4, torch.float32)
    with ForwardContext(batch, pool, NoAttention()):
        with pytest.raises(ContextError, match="got 4 rows but the forward context's batch has 3"):
            REQUEST_LENGTHS(torch.arange(4)[None], torch.empty(4, dtype=torch.int64))
        with pytest.raises(ContextError, match=r"request lengths got an output \[3\] of torch.int32; allowed is \[T\] of torch.int64"):
            REQUEST_LENGTHS(torch.arange(3)[None], torch.empty(3, dtype=torch.int32))


@pytest.mark.parametrize("length", [6, -1])
def test_a_request_that_is_shorter_than_its_step_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"request 1 has length={length}; allowed are 0 and 7 and above, as it has 4 cached and 3 new"):
        Batch.build([DECODE, CHUNK._replace(length=length)], 4)
