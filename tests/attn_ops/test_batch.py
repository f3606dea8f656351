"""Ragged batches against an oracle that walks token by token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, ForwardMode, RequestColumns
from paged_attn.attn_ops.errors import UnsupportedError


def request(cached: int, new: int, page_size: int, *, first_page: int = 1, spare: int = 0, num_logits: int = 1) -> BatchRequest:
    count = math.ceil((cached + new) / page_size) + spare
    pages = list(range(first_page + count - 1, first_page - 1, -1))
    return BatchRequest(list(range(10, 10 + new)), pages, cached, num_logits)


@st.composite
def requests(draw):
    page_size = draw(st.sampled_from([1, 2, 16, 64]))
    made, first_page = [], 1
    for cached, new, spare in draw(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 20), st.integers(0, 2)), max_size=5)):
        num_logits = draw(st.integers(0, new))
        made.append(request(cached, new, page_size, first_page=first_page, spare=spare, num_logits=num_logits))
        first_page += len(made[-1].pages)
    return made, page_size


@given(requests())
def test_fields_equal_a_token_by_token_walk(drawn):
    made, page_size = drawn
    tokens, wanted = [], []
    for index, r in enumerate(made):
        for offset, token in enumerate(r.tokens):
            position = r.num_cached + offset
            if len(r.tokens) - offset <= r.num_logits:
                wanted.append(len(tokens))
            tokens.append((index, token, position, r.pages[position // page_size] * page_size + position % page_size))
    batch = Batch.build(made, page_size)
    count = len(tokens)
    assert (batch.num_tokens, batch.num_requests, batch.page_size) == (count, len(made), page_size)
    assert batch.num_rows == max(2, count) == len(batch.positions) == len(batch.slots)
    rows = list(zip(batch.input_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True))
    assert rows[:count] == [t[1:] for t in tokens]
    assert all(row == (0, 0, 0) for row in rows[count:])

    assert batch.query_lens.tolist() == list(batch.query_lens_host) == [sum(t[0] == i for t in tokens) for i in range(len(made))]
    assert batch.seq_lens.tolist() == list(batch.seq_lens_host) == [r.num_cached + len(r.tokens) for r in made]
    starts = [next(row for row, t in enumerate(tokens) if t[0] == i) for i in range(len(made))]
    assert batch.query_start.tolist() == [*starts, count]

    assert np.array_equal(batch.page_table_host, batch.page_table)
    assert batch.page_table.shape[0] == len(made)
    for table, r in zip(batch.page_table.tolist(), made, strict=True):
        assert table[: len(r.pages)] == r.pages and not any(table[len(r.pages) :])

    assert batch.num_logits == len(wanted)
    assert batch.logits_rows.tolist()[: len(wanted)] == wanted
    assert len(batch.logits_rows) == max(2, len(wanted))
    assert all(0 <= row < batch.num_rows for row in batch.logits_rows.tolist())


def test_the_tensors_are_views_of_one_copy():
    batch = Batch.build([request(3, 2, 4), request(9, 1, 4, first_page=5)], 4)
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 10
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors)


def test_what_dynamo_sees_are_no_views():
    """Of a view it would make the offset a symbol of the graph."""
    inputs = Batch.build([request(3, 5, 4)], 4).model_inputs()
    for name in ("input_ids", "position_ids"):
        assert inputs[name].storage_offset() == 0 and inputs[name].untyped_storage().nbytes() == 5 * 8


def test_slots_beyond_32_bits():
    assert Batch.build([BatchRequest([1, 2], [2**30 + 5], 3)], 64).slots.tolist() == [(2**30 + 5) * 64 + 3, (2**30 + 5) * 64 + 4]


def test_a_single_row_of_logits_is_repeated():
    batch = Batch.build([request(2, 5, 4)], 4)
    assert (batch.num_logits, batch.logits_rows.tolist()) == (1, [4, 4])


@pytest.mark.parametrize("page_dtype", [np.int32, np.int64, np.uint16])
def test_arrays_equal_lists(page_dtype):
    lists = [request(c, n, 4, first_page=f) for c, n, f in ((3, 5, 1), (0, 1, 9), (30, 1, 11))]
    arrays = [r._replace(tokens=np.array(r.tokens), pages=np.array(r.pages, dtype=page_dtype)) for r in lists]
    expected, got = Batch.build(lists, 4), Batch.build(arrays, 4)
    for name, value in vars(expected).items():
        assert np.array_equal(value, getattr(got, name)), name


@pytest.mark.parametrize("count", [0, 1, 3])
def test_columns_are_the_requests(count):
    rows = [request(c, n, 4, first_page=f) for c, n, f in ((3, 1, 1), (7, 1, 9), (30, 1, 11))][:count]
    columns = RequestColumns.of(rows)
    named = [row._replace(length=row.num_cached + len(row.tokens)) for row in rows]
    assert columns.rows() == named and len(columns) == count and RequestColumns.of(columns) is columns
    assert columns.all_decode == (count > 0)
    expected, got = Batch.build(rows, 4), Batch.build(columns, 4)
    for name, value in vars(expected).items():
        assert np.array_equal(value, getattr(got, name)), name


@pytest.mark.parametrize("other", [(3, 2, 1), (0, 1, 1), (3, 1, 0)])
def test_a_step_that_is_no_decode(other):
    cached, new, logits = other
    rows = [request(7, 1, 4), request(cached, new, 4, first_page=9)._replace(num_logits=logits)]
    assert RequestColumns.of(rows[:1]).all_decode and not RequestColumns.of(rows).all_decode


def test_a_decode_batch_makes_as_many_torch_calls_for_64_requests_as_for_2():
    counts = []
    for number in (2, 64):
        with CallCounter() as counter:
            Batch.build([request(33, 1, 4, first_page=1 + 9 * i) for i in range(number)], 4)
        counts.append(counter.calls)
    assert 0 < counts[0] == counts[1]


class CallCounter(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_dtypes():
    batch = Batch.build([request(3, 2, 4)], 4)
    for name in ("input_ids", "positions", "slots", "logits_rows"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("page_table", "seq_lens", "query_lens", "query_start"):
        assert getattr(batch, name).dtype == torch.int32, name


@pytest.mark.parametrize(
    ("lengths", "mode"),
    [
        ([], ForwardMode.IDLE),
        ([(0, 5)], ForwardMode.EXTEND),
        ([(0, 1)], ForwardMode.EXTEND),
        ([(4, 2), (0, 1)], ForwardMode.EXTEND),
        ([(4, 1)], ForwardMode.DECODE),
        ([(4, 1), (1, 1)], ForwardMode.DECODE),
        ([(4, 1), (0, 1)], ForwardMode.MIXED),
        ([(0, 3), (4, 1)], ForwardMode.MIXED),
    ],
)
def test_modes(lengths, mode):
    assert Batch.build([request(c, n, 4) for c, n in lengths], 4).mode is mode


def test_one_token_is_padded_to_two_rows_in_the_reserved_page():
    batch = Batch.build([request(5, 1, 4, first_page=7)], 4)
    assert (batch.num_tokens, batch.num_rows, batch.num_logits) == (1, 2, 1)
    assert batch.slots.tolist() == [7 * 4 + 1, 0]
    assert batch.logits_rows.tolist() == [0, 0]
    assert batch.query_start.tolist() == [0, 1]


def test_an_idle_batch_is_two_rows_of_padding():
    batch = Batch.build([], 16)
    assert (batch.num_requests, batch.num_tokens, batch.num_rows, batch.num_logits) == (0, 0, 2, 0)
    assert batch.slots.tolist() == batch.input_ids.tolist() == batch.positions.tolist() == [0, 0]
    assert batch.page_table.shape == (0, 1) and batch.query_start.tolist() == [0]
    assert batch.seq_lens_host == batch.query_lens_host == ()


def test_a_chunk_that_wants_no_logits():
    batch = Batch.build([request(0, 4, 4, num_logits=0), request(0, 3, 4, first_page=5, num_logits=3)], 4)
    assert batch.num_logits == 3
    assert batch.logits_rows.tolist() == [4, 5, 6]


def test_spare_pages_are_kept_and_may_be_unset():
    """Only the pages that this step touches are checked; the rest of a captured table's row may hold zeros."""
    batch = Batch.build([BatchRequest([1, 2], [3, 0, 0])], 4)
    assert batch.page_table.tolist() == [[3, 0, 0]]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (BatchRequest([], [1]), ValueError, "request 1 of the batch has no new token; leave it out"),
        (BatchRequest([], [], 0), ValueError, "request 1 of the batch has no new token"),
        (BatchRequest([], [1], 0, 0), ValueError, "request 1 of the batch has no new token"),
        (BatchRequest([1] * 5, [1], 4), UnsupportedError, "request 1 has 1 pages of 4 .* 4 cached . 5 new .* need 3; allocate 2"),
        (BatchRequest([1], [], 0), UnsupportedError, "request 1 has 0 pages"),
        (BatchRequest([1], [1], 4), UnsupportedError, "need 2; allocate 1 more"),
        (BatchRequest([1], [0]), ValueError, "request 1 lists page 0.* reserved"),
        (BatchRequest([1], [2, 0], 4), ValueError, "request 1 lists page 0"),
        (BatchRequest([1], [-3]), ValueError, "request 1 lists page -3"),
        (BatchRequest([1, 2], [1], -1), ValueError, "request 1 has num_cached=-1; allowed are 0 and above"),
        (BatchRequest([1, 2], [1], 0, 3), ValueError, "request 1 wants 3 logits of 2 new tokens; allowed are 0 to 2"),
        (BatchRequest([1, 2], [1], 0, -1), ValueError, "request 1 wants -1 logits"),
    ],
)  # fmt: skip
def test_refusals_name_the_request_and_what_is_allowed(bad, error, message):
    with pytest.raises(error, match=message):
        Batch.build([BatchRequest([7], [9]), bad], 4)


def test_the_first_wrong_request_is_named():
    late, early = BatchRequest([], [1]), BatchRequest([1], [0])
    with pytest.raises(ValueError, match="request 1 lists page 0"):
        Batch.build([BatchRequest([7], [9]), early, late], 4)
    with pytest.raises(ValueError, match="request 1 of the batch has no new token"):
        Batch.build([BatchRequest([7], [9]), late, early], 4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (BatchRequest([1.5], [1]), "the tokens of request 1 must be integers of 64 bits; got 1.5"),
        (BatchRequest([1], [2**31]), "the pages of request 1 must be integers of 32 bits; got 2147483648"),
        (BatchRequest([1], [3, 2.0]), "the pages of request 1 must be integers of 32 bits; got 2.0"),
        (BatchRequest([1], [3], 0.5), r"num_cached, num_logits, state_slot and length must be integers; got \(0, 0.5\)"),
    ],
)
def test_what_is_no_integer_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        Batch.build([BatchRequest([7], [9]), bad], 4)


def test_a_zero_among_spare_pages_does_not_hide_one_among_the_needed():
    requests = [BatchRequest([1], [3, 0]), BatchRequest([1], [4, 0, 5], 9)]
    with pytest.raises(ValueError, match="request 1 lists page 0"):
        Batch.build(requests, 4)


def test_a_full_page_needs_no_further_page():
    assert Batch.build([BatchRequest([1], [5], 3)], 4).slots.tolist()[0] == 5 * 4 + 3


def test_model_inputs_are_one_row_with_a_dynamic_token_dimension():
    batch = Batch.build([request(2, 3, 4), request(0, 1, 4, first_page=5)], 4)
    inputs = batch.model_inputs()
    assert set(inputs) == {"input_ids", "position_ids", "use_cache"} and inputs["use_cache"] is False
    assert inputs["input_ids"].tolist() == [batch.input_ids.tolist()]
    assert inputs["position_ids"].tolist() == [[2, 3, 4, 0]]
    for name in ("input_ids", "position_ids"):
        assert inputs[name]._dynamo_dynamic_indices == {1}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (BatchRequest([5], [1]), "requests of a batch are a BatchRequest; allowed: a list"),
        (7, "requests of a batch are a int"),
        ([([5], [1])], "request 0 of the batch is a tuple; allowed: BatchRequest"),
        ([BatchRequest([5], [1]), BatchRequest(5, [1])], "request 1 of the batch has tokens that are a int; allowed: a sequence"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_request_is_refused(bad, message):
    with pytest.raises(TypeError, match=message):
        Batch.build(bad, 4)


def test_a_page_without_tokens_is_refused():
    with pytest.raises(ValueError, match="page_size is 0; allowed are 1 and above"):
        Batch.build([BatchRequest([5], [1])], 0)
