"""The op that recomputes from recompute: schema, opcheck, what it stores and reads, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.kv_pool import KVPool, page_elements
from paged_attn.attn_ops.ops.recompute import RECOMPUTE_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.recompute import RecomputeSpec, RowInput
from paged_attn.backends.selection.select import select_for_pool
from paged_attn.capture.split.split_ops import split_ops

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
PAGE_SIZE = 4
SMALL = AttentionSpec(2, 1, 8, 8, 1.0)


def program(length: int, rows: Sequence[Tensor], owned: Sequence[Tensor]) -> Tensor:
    """Running sums of row 0 [1, 2, T, 3], times row 1 [T], plus the operand [3] and the position: [T, 2, 3]."""
    states, gates = rows
    assert states.shape == (1, 2, length, 3) and gates.shape == (length,)
    assert not states.isnan().any() and not gates.isnan().any()  # nothing of an unused page, slot or padded row
    sums = states.cumsum(2)[0].transpose(0, 1) * gates[:, None, None]
    return sums.float() + owned[0] + torch.arange(length)[:, None, None]


def layer(dtype: torch.dtype = torch.float32, page_dtype: torch.dtype = torch.float32, min_tokens: int = 2) -> RecomputeSpec:
    times = max(1, dtype.itemsize // page_dtype.itemsize)
    rows = (RowInput((1, 2, 3), 2, (0, 2, 1, 3), dtype, 6 * times), RowInput((), 0, (0,), dtype, times))
    return RecomputeSpec(2, 1, 16, 0, 1.0, kv_layer=1, rows=rows, min_tokens=min_tokens, computes="sums", program=program)


class Steps:
    """Three requests with shuffled pages; every page that none of them uses, and every padded row, is NaN."""

    lengths = ((5, 9), (1, 2), (3, 4))  # after the first and the second step
    tables = ([7, 3, 5], [2], [9])

    def __init__(self, spec: RecomputeSpec, page_dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.spec, self.owned = spec, [torch.tensor([1.0, 2.0, 3.0])]
        self.pool = KVPool([SMALL, spec], 12, PAGE_SIZE, page_dtype)
        self.pool.storage.fill_(float("nan"))
        self.data = [[torch.randn(n, row.width, generator=generator).to(row.dtype) for row in spec.rows] for _, n in self.lengths]

    def batch(self, step: int, padding: int = 0) -> Batch:
        starts = [0 if step == 0 else first for first, _ in self.lengths]
        requests = [
            BatchRequest([1] * (lengths[step] - start), table, start, 0)
            for start, lengths, table in zip(starts, self.lengths, self.tables, strict=True)
        ]
        batch = Batch.build(requests, PAGE_SIZE)
        more = torch.zeros(padding, dtype=torch.int64)
        return replace(batch, input_ids=torch.cat([batch.input_ids, more]), slots=torch.cat([batch.slots, more]))

    def rows(self, step: int, padding: int = 0) -> list[Tensor]:
        parts = [
            [one[0 if step == 0 else lengths[0] : lengths[step]] for one in each]
            for each, lengths in zip(self.data, self.lengths, strict=True)
        ]
        rows = [torch.cat(column) for column in zip(*parts, strict=True)]
        return [torch.cat([one, torch.full((padding, one.shape[1]), float("nan"), dtype=one.dtype)]) for one in rows]

    def expected(self, step: int) -> Tensor:
        results = []
        for each, lengths in zip(self.data, self.lengths, strict=True):
            start, end = 0 if step == 0 else lengths[0], lengths[step]
            tensors = [each[0][:end].reshape(end, 1, 2, 3).permute(1, 2, 0, 3), each[1][:end, 0]]
            results.append(program(end, tensors, self.owned)[start:])
        return torch.cat(results)

    def run(self, step: int, padding: int = 0) -> Tensor:
        rows = self.rows(step, padding)
        output = torch.full((len(rows[0]), 2, 3), float("nan"))
        with ForwardContext(self.batch(step, padding), self.pool, select_for_pool("auto", self.pool).backend):
            RECOMPUTE_ATTENTION(rows, self.owned, output, 1)
        return output


def test_schema_mutates_output_alone() -> None:
    assert str(RECOMPUTE_ATTENTION._schema) == (
        "paged_attn::recompute_attention_with_output(Tensor[] rows, Tensor[] owned, Tensor(a!) output, int layer_id) -> ()"
    )
    assert RECOMPUTE_ATTENTION is torch.ops.paged_attn.recompute_attention_with_output.default
    assert RECOMPUTE_ATTENTION in split_ops()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("operands", [0, 1])
def test_opcheck(grad: bool, operands: int) -> None:
    def without_operand(length: int, rows: Sequence[Tensor], owned: Sequence[Tensor]) -> Tensor:
        return program(length, rows, owned or [torch.zeros(3)])

    steps = Steps(replace(layer(), program=without_operand))
    rows = [row.requires_grad_(grad) for row in steps.rows(0)]
    with ForwardContext(steps.batch(0), steps.pool, select_for_pool("auto", steps.pool).backend):
        results = torch.library.opcheck(RECOMPUTE_ATTENTION, (rows, steps.owned[:operands], torch.zeros(len(rows[0]), 2, 3), 1))
    assert results == dict.fromkeys(UTILITIES, "SUCCESS")


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("min_tokens", [2, 11])
def test_two_steps_of_a_ragged_batch(padding: int, min_tokens: int) -> None:
    counts = []

    def counting(length: int, rows: Sequence[Tensor], owned: Sequence[Tensor]) -> Tensor:
        counts.append(length)
        return program(length, rows, owned)

    steps = Steps(replace(layer(min_tokens=min_tokens), program=counting))
    for step in (0, 1):
        output = steps.run(step, padding)
        real = len(output) - padding
        torch.testing.assert_close(output[:real], steps.expected(step))
        assert (output[real:] == 0).all()
    assert counts == ([5, 2, 3, 9, 2, 4] if min_tokens == 2 else [11] * 6)


@pytest.mark.parametrize("joined", [False, True])
def test_no_more_tokens_are_read_than_the_program_reaches_back(joined: bool) -> None:
    counts = []

    def with_the_one_before(length: int, rows: Sequence[Tensor], owned: Sequence[Tensor]) -> Tensor:
        counts.append(length)
        states = rows[0][0].transpose(0, 1)
        return states + torch.cat([torch.zeros(1, 2, 3), states[:-1]])

    steps = Steps(replace(layer(), reach=1, joined=joined, program=with_the_one_before))
    first, second = steps.run(0, padding=2), steps.run(1, padding=2)
    assert counts == [5, 2, 3, *([9] if joined else [5, 2, 2])]
    states = [each[0].view(-1, 2, 3) for each in steps.data]
    whole = [each + torch.cat([torch.zeros(1, 2, 3), each[:-1]]) for each in states]
    assert torch.equal(first[:9], torch.cat([each[: lengths[0]] for each, lengths in zip(whole, steps.lengths, strict=True)]))
    assert torch.equal(second[:6], torch.cat([each[lengths[0] :] for each, lengths in zip(whole, steps.lengths, strict=True)]))
    assert (first[9:] == 0).all() and (second[6:] == 0).all()
    assert steps.spec.describe() == "2 heads, causal, recomputed from a new one and 1 before it: 7 values a token"


def test_a_request_without_enough_tokens_before_its_new_ones_runs_alone() -> None:
    counts = []

    def with_two_before(length: int, rows: Sequence[Tensor], owned: Sequence[Tensor]) -> Tensor:
        counts.append(length)
        return torch.nn.functional.pad(rows[0][0].transpose(0, 1), (0, 0, 0, 0, 2, -2))

    steps = Steps(replace(layer(), reach=2, joined=True, program=with_two_before))
    steps.run(0)
    output = steps.run(1)
    assert counts == [5, 2, 3, 9, 2]  # 4 + 2 and 1 + 2 tokens in one run; the second request has one before its new one
    assert torch.equal(output[:4], steps.data[0][0].view(-1, 2, 3)[3:7]) and (output[4] == 0).all()
    assert torch.equal(output[5], steps.data[2][0].view(-1, 2, 3)[1])


def test_it_writes_its_own_slots_alone() -> None:
    steps = Steps(layer())
    steps.run(0, padding=2)
    keys = steps.pool.key(1)[:, :, 0]
    written = {(page, offset) for page, offset in (~keys[..., :7].isnan()).all(-1).nonzero().tolist()}
    assert written == {(7, 0), (7, 1), (7, 2), (7, 3), (3, 0), (2, 0), (9, 0), (9, 1), (9, 2)}
    assert keys[..., 7:].isnan().all() and steps.pool.key(0).isnan().all() and steps.pool.value(0).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "page_dtype"),
    [(torch.float32, torch.bfloat16), (torch.float64, torch.float32), (torch.float64, torch.float16), (torch.bfloat16, torch.float32)],
)
def test_rows_of_another_dtype_than_the_pages_are_not_rounded(dtype: torch.dtype, page_dtype: torch.dtype) -> None:
    spec = replace(layer(dtype, page_dtype), qk_head_dim=32)
    steps = Steps(spec, page_dtype)
    for step in (0, 1):
        assert torch.equal(steps.run(step), steps.expected(step))


def test_wide_rows_fit_pages_that_are_wider_than_they_were_laid_out_for() -> None:
    steps = Steps(layer(torch.float32, torch.bfloat16), torch.float32)
    assert torch.equal(steps.run(0), steps.expected(0))


def test_pages_for_which_the_rows_were_not_laid_out() -> None:
    steps = Steps(replace(layer(torch.float64, torch.float32), qk_head_dim=16), torch.bfloat16)
    with pytest.raises(ContextError, match=r"pages hold torch.bfloat16, for which 6 values of torch.float64 .* the model's dtype"):
        steps.run(0)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)])
def test_a_tensor_lies_in_memory_as_it_was_traced(order: tuple[int, ...]) -> None:
    row = RowInput((1, 2, 3), 2, order, torch.float32, 6)
    values = torch.arange(30.0).reshape(5, 6)
    tensor = row.restored(row.stored(values, torch.float32))
    assert torch.equal(tensor, values.reshape(5, 1, 2, 3).permute(1, 2, 0, 3))
    assert tensor.permute(order).is_contiguous()


def test_to_the_pool_it_is_a_layer_without_values() -> None:
    spec = layer()
    pool = KVPool([SMALL, spec], 3, PAGE_SIZE, torch.float32)
    assert page_elements([SMALL, spec], PAGE_SIZE) == PAGE_SIZE * (16 + 16)
    assert pool.key(1).shape == (3, PAGE_SIZE, 1, 16) and pool.value(1).shape == (3, PAGE_SIZE, 1, 0)
    assert select_for_pool("auto", pool).backend.name == "torch_native"
    assert spec.describe() == "2 heads, causal, recomputed from all tokens: 7 values a token"


def test_specs_differ_by_what_they_compute_not_by_the_object_that_does() -> None:
    spec = layer()
    assert spec == replace(spec, program=lambda *_: torch.empty(0)) and hash(spec) == hash(replace(spec, program=min))
    assert spec.differences(replace(spec, computes="other")) == ["computes"]
    assert "rows" in spec.differences(SMALL) and "rows" in SMALL.differences(spec)


def test_outside_any_context() -> None:
    with pytest.raises(ContextError, match="outside any forward context"):
        RECOMPUTE_ATTENTION([torch.zeros(2, 6)], [], torch.zeros(2, 2, 3), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 3}, "recompute_attention_with_output got 3 rows .* batch has 9; .*model_inputs"),
        ({"layer_id": 0}, r"layer 0 of the pool is not the model's, which is recomputed from \[6, 1\] values"),
        ({"layer_id": 2}, "layer 2 of the pool is not the model's"),
        ({"inputs": 1}, r"layer 1 of the pool is not the model's, which is recomputed from \[6\] values"),
    ],
)
def test_what_does_not_belong_together(change: dict[str, int], message: str) -> None:
    steps = Steps(layer())
    rows = steps.rows(0)[: change.get("inputs", 2)]
    output = torch.zeros(change.get("rows", len(rows[0])), 2, 3)
    with ForwardContext(steps.batch(0), steps.pool, select_for_pool("auto", steps.pool).backend):
        with pytest.raises(ContextError, match=message):
            RECOMPUTE_ATTENTION(rows, steps.owned, output, change.get("layer_id", 1))


def test_on_meta_tensors_it_does_nothing() -> None:
    RECOMPUTE_ATTENTION([torch.empty(4, 6, device="meta")], [], torch.empty(4, 2, 3, device="meta"), 0)
