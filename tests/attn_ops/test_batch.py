"""Ragged batches against an oracle that walks token by token."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_attn.attn_ops.batch import Batch, BatchRequest, ForwardMode
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

    assert batch.page_table.shape[0] == len(made)
    for table, r in zip(batch.page_table.tolist(), made, strict=True):
        assert table[: len(r.pages)] == r.pages and not any(table[len(r.pages) :])

    assert batch.num_logits == len(wanted)
    assert batch.logits_rows.tolist()[: len(wanted)] == wanted
    assert len(batch.logits_rows) == max(2, len(wanted))
    assert all(0 <= row < batch.num_rows for row in batch.logits_rows.tolist())


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
