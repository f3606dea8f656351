"""Steps of fixed size at fixed addresses: padded steps hold what plain ones hold, and their fields stay where the shape puts them."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, ForwardMode, RequestColumns
from paged_attn.attn_ops.batch.packed_ints import ALIGNMENT
from paged_attn.attn_ops.batch.step_buffers import MIN_ROWS, StepBuffers, StepShape
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.torch_native import TorchNativeBackend

PAGE_SIZE = 4
ROWS, LOGITS, REQUESTS, PAGES = 48, 12, 8, 10


def buffers() -> StepBuffers:
    return StepBuffers(ROWS, LOGITS, REQUESTS, PAGES, "cpu")


def some(lengths: list[tuple[int, int]], spare: int = 0, first: int = 1) -> list[BatchRequest]:
    """Requests of (cached, new) tokens with pages of their own, state slots 1, 2, ..."""
    made = []
    for index, (cached, new) in enumerate(lengths):
        count = -(-(cached + new) // PAGE_SIZE) + spare
        made.append(BatchRequest(range(10, 10 + new), range(first, first + count), cached, 1, index + 1))
        first += count
    return made


STEPS = st.lists(st.tuples(st.integers(0, 25), st.integers(1, 5)), max_size=6).map(some)
DECODES = st.lists(st.integers(1, 30), max_size=6).map(lambda cached: some([(c, 1) for c in cached]))


def tensors_of(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}


def addresses(batch: Batch) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors_of(batch).items()}


@pytest.mark.parametrize("fixed", [False, True])
@given(requests=STEPS, more_rows=st.integers(0, 18), more_logits=st.integers(0, 6))
def test_a_padded_step_is_the_plain_step_and_padding(fixed, requests, more_rows, more_logits):
    plain = Batch.build(requests, PAGE_SIZE)
    shape = StepShape(plain.num_rows + more_rows, len(plain.logits_rows) + more_logits)
    batch = Batch.build(requests, PAGE_SIZE, shape=shape, buffers=buffers() if fixed else None)
    for name, value in vars(plain).items():
        found, real = getattr(batch, name), len(value) if isinstance(value, torch.Tensor) else None
        assert np.array_equal(found[:real] if real is not None else found, value), name
    assert (batch.num_rows, len(batch.logits_rows)) == shape[:2]
    for name in ("input_ids", "positions", "slots"):
        assert len(getattr(batch, name)) == shape.rows and not getattr(batch, name)[plain.num_tokens :].any(), name
    assert all(0 <= row < max(1, plain.num_tokens) for row in batch.logits_rows.tolist())
    assert (batch.num_real_requests, batch.num_dummies) == (len(requests), 0)
    assert batch.page_table.shape == plain.page_table.shape and len(batch.seq_lens) == len(requests)


@pytest.mark.parametrize("fixed", [False, True])
@given(requests=DECODES, size=st.integers(MIN_ROWS, REQUESTS))
def test_decodes_are_followed_by_dummies(fixed, requests, size):
    size = max(size, len(requests))
    plain, real = Batch.build(requests, PAGE_SIZE), len(requests)
    batch = Batch.build(requests, PAGE_SIZE, shape=StepShape(size, size, size), buffers=buffers() if fixed else None)
    assert batch.mode is ForwardMode.DECODE
    assert batch.num_tokens == batch.num_logits == batch.num_requests == batch.num_rows == size
    assert (batch.num_real_requests, batch.num_dummies) == (real, size - real)
    for name in ("input_ids", "positions", "slots", "seq_lens", "query_lens"):
        padding = int(name in ("seq_lens", "query_lens"))
        assert getattr(batch, name).tolist() == getattr(plain, name)[:real].tolist() + [padding] * (size - real), name
    assert batch.query_start.tolist() == list(range(size + 1)) and batch.logits_rows.tolist() == list(range(size))
    assert list(batch.seq_lens_host) == batch.seq_lens.tolist() and list(batch.query_lens_host) == batch.query_lens.tolist()
    assert batch.state_slots_host == plain.state_slots_host + (0,) * (size - real)
    width = plain.page_table.shape[1]
    assert batch.page_table.shape == (size, PAGES if fixed else width)
    assert batch.page_table[:real, :width].equal(plain.page_table) and not batch.page_table[real:, 0].any()
    assert np.array_equal(batch.page_table_host, batch.page_table[:, :width])


@given(st.lists(STEPS, min_size=2, max_size=4))
def test_addresses_of_a_ragged_step_follow_from_its_shape(steps):
    memory, shape = buffers(), StepShape(32, 7)
    steps = [requests or some([(0, 1)]) for requests in steps]  # an empty tensor has no address
    found = [addresses(Batch.build(requests, PAGE_SIZE, shape=shape, buffers=memory)) for requests in steps]
    assert all(one == found[0] for one in found) and len(found[0]) == 10
    assert all(address % ALIGNMENT == found[0]["input_ids"] % ALIGNMENT for address in found[0].values())


def test_addresses_do_not_follow_the_number_of_requests():
    """As many as cross the alignment of the lengths; the largest fills the buffers to the end."""
    memory, shape = StepBuffers(64, 64, 64, 40, "cpu"), StepShape(64, 64)
    found = []
    for count in (1, 31, 32, 33, 63, 64):
        requests = [BatchRequest([1], range(1, 41), 159)] * count
        batch = Batch.build(requests, PAGE_SIZE, shape=shape, buffers=memory)
        found.append(addresses(batch))
        assert batch.page_table.tolist() == [list(range(1, 41))] * count
    assert all(one == found[0] for one in found)
    decode = Batch.build(requests, PAGE_SIZE, shape=StepShape(64, 64, 64), buffers=memory)
    assert decode.page_table.equal(batch.page_table)


@given(st.lists(DECODES, min_size=2, max_size=4))
def test_addresses_and_strides_of_a_decode_step_follow_from_its_shape(steps):
    memory, shape = buffers(), StepShape(7, 7, 7)
    found = []
    for requests in steps:
        batch = Batch.build(requests, PAGE_SIZE, shape=shape, buffers=memory)
        found.append((addresses(batch), {name: (t.shape, t.stride()) for name, t in tensors_of(batch).items()}))
        assert batch.page_table.data_ptr() == memory.page_tables[0].data_ptr() and batch.page_table.stride() == (PAGES, 1)
    assert all(one == found[0] for one in found)


def test_all_fields_lie_in_the_buffers_and_apart():
    memory = buffers()
    batch = Batch.build(some([(3, 2)] * REQUESTS), PAGE_SIZE, shape=StepShape(ROWS, LOGITS), buffers=memory)
    places = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors_of(batch).values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    assert len({t.untyped_storage().data_ptr() for t in tensors_of(batch).values()}) == 1
    assert memory.nbytes == batch.input_ids.untyped_storage().nbytes() + memory.page_tables[0].untyped_storage().nbytes()


def test_the_largest_step_of_each_kind_fits():
    memory = buffers()
    longest = PAGES * PAGE_SIZE
    pages = [range(1, 1 + PAGES)] * REQUESTS
    ragged = [BatchRequest([1] * 6, p, longest - 6) for p in pages]
    Batch.build(ragged, PAGE_SIZE, shape=StepShape(ROWS, LOGITS), buffers=memory)
    decodes = [BatchRequest([1], p, longest - 1) for p in pages]
    batch = Batch.build(decodes, PAGE_SIZE, shape=StepShape(REQUESTS, REQUESTS, REQUESTS), buffers=memory)
    assert batch.page_table.tolist() == [list(p) for p in pages]


def test_dummies_do_not_keep_pages_of_the_step_before():
    memory, shape = buffers(), StepShape(4, 4, 4)
    before = Batch.build(some([(30, 1)] * 4), PAGE_SIZE, shape=shape, buffers=memory)
    assert before.page_table[:, 0].all()
    after = Batch.build(some([(2, 1)]), PAGE_SIZE, shape=shape, buffers=memory)
    assert after.page_table[:, 0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(("shape", "copies"), [(StepShape(8, 8), 1), (StepShape(8, 8, 8), 2)])
def test_a_step_is_one_copy_and_one_more_places_the_table(shape, copies):
    memory = buffers()
    with Copies() as seen:
        Batch.build(some([(7, 1)] * 8), PAGE_SIZE, shape=shape, buffers=memory)
    assert seen.count == copies


class Copies(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::copy_", "aten::_to_copy")
        return func(*args, **(kwargs or {}))


def test_a_step_of_dummies_only_decodes():
    batch = Batch.build([], PAGE_SIZE, shape=StepShape(3, 3, 3), buffers=buffers())
    assert (batch.mode, batch.num_requests, batch.num_real_requests) == (ForwardMode.DECODE, 3, 0)
    assert batch.seq_lens.tolist() == [1, 1, 1] and batch.logits_rows.tolist() == [0, 1, 2]


def test_host_lengths_may_be_replaced_for_a_capture():
    batch = Batch.build(some([(5, 1)]), PAGE_SIZE, shape=StepShape(3, 3, 3), buffers=buffers())
    assert dataclasses.replace(batch, seq_lens_host=(40,) * 3).num_real_requests == 1


@pytest.mark.parametrize("made_in", [True, False])
def test_inference_mode_may_come_and_go(made_in):
    with torch.inference_mode(made_in):
        memory = buffers()
    for inference in (True, False):
        with torch.inference_mode(inference):
            batch = Batch.build(some([(5, 1)]), PAGE_SIZE, shape=StepShape(2, 2, 2), buffers=memory)
            assert batch.seq_lens.tolist() == [6, 1]


@pytest.mark.parametrize("backend", [ReferenceBackend, TorchNativeBackend])
@pytest.mark.parametrize("poison", [0, 33])
def test_attention_of_real_rows_is_that_of_the_plain_step(poison, backend):
    """Also over buffers that other steps have used, with NaN in every page that no request holds."""
    spec = AttentionSpec(4, 2, 8, 8, 0.5)
    lengths, generator = [(9, 1), (4, 1), (17, 1)], torch.Generator().manual_seed(0)
    requests = some(lengths, first=2)
    pool = KVPool([spec], 40, PAGE_SIZE, torch.float32)
    pool.storage.normal_(generator=generator)
    held = {page for request in requests for page in request.pages}
    for page in set(range(40)) - held:
        pool.key(0)[page] = pool.value(0)[page] = float("nan")
    memory = buffers()
    memory.page_tables[0].fill_(poison)
    rows = {name: torch.randn(6, heads, 8, generator=generator) for name, heads in (("query", 4), ("key", 2), ("value", 2))}

    def attend(batch: Batch) -> torch.Tensor:
        query, key, value = (rows[name][: batch.num_rows] for name in ("query", "key", "value"))
        output = torch.full((batch.num_rows, 4, 8), float("nan"))
        with ForwardContext(batch, pool, backend()):
            UNIFIED_ATTENTION(query, key, value, output, 0, True)
        return output

    expected = attend(Batch.build(requests, PAGE_SIZE))
    before = pool.storage.clone()
    found = attend(Batch.build(requests, PAGE_SIZE, shape=StepShape(6, 6, 6), buffers=memory))
    torch.testing.assert_close(found[:3], expected[:3])
    changed = (pool.storage != before) & ~(pool.storage.isnan() & before.isnan())
    assert changed.view(40, -1).any(1).nonzero().flatten().tolist() == [0]  # dummies write to the reserved page alone
    if backend is ReferenceBackend:
        assert found.isfinite().all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (StepShape(2, 2), "needs 3 rows at least; got StepShape.rows=2"),
        (StepShape(1, 2), "needs 3 rows"),
        (StepShape(3, 1), "needs 3 logits at least"),
        (StepShape(2, 2, 2), "needs 3 requests at least.*take a larger shape or fewer requests"),
        (StepShape(4, 5, 4), "as many rows and logits as requests; got StepShape.rows=4, logits=5, requests=4"),
        (StepShape(5, 4, 4), "as many rows and logits"),
    ],
)
def test_a_shape_too_small_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        Batch.build(some([(5, 1)] * 3), PAGE_SIZE, shape=shape)


@pytest.mark.parametrize(("shape", "least"), [(StepShape(1, 2), 2), (StepShape(2, 1), 2), (StepShape(0, 0, 0), 1)])
def test_a_shape_below_the_smallest_is_refused(shape, least):
    with pytest.raises(ValueError, match=rf"needs {least} (rows|logits) at least"):
        Batch.build([], PAGE_SIZE, shape=shape)


def test_a_step_of_one_request_may_have_one_row():
    alone, beside = (Batch.build([BatchRequest([7], [3], 3)], 4, shape=StepShape(size, size, size)) for size in (1, 2))
    for name in ("input_ids", "positions", "slots", "seq_lens", "query_lens", "logits_rows", "page_table"):
        assert torch.equal(getattr(alone, name), getattr(beside, name)[:1]), name
    assert (alone.num_rows, alone.num_tokens, alone.num_requests, alone.num_dummies, alone.query_start.tolist()) == (1, 1, 1, 0, [0, 1])


@pytest.mark.parametrize(
    ("bad", "shown"),
    [
        (BatchRequest([1, 2], [5], 1), "request 1 has 2 new tokens after 1 cached ones and wants 1 logits"),
        (BatchRequest([1], [5], 0), "request 1 has 1 new tokens after 0 cached ones"),
        (BatchRequest([1], [5], 1, 0), "request 1 has .* wants 0 logits, but .* give a shape without `requests`"),
        (BatchRequest([1, 2], [5], 1, 0), "request 1 has 2 new tokens"),
    ],
)
def test_dummies_follow_only_decode_steps(bad, shown):
    with pytest.raises(ValueError, match=shown):
        Batch.build([BatchRequest([1], [4], 2), bad], PAGE_SIZE, shape=StepShape(4, 4, 4))


def test_a_wrong_request_is_named_before_the_shape_is_looked_at():
    with pytest.raises(ValueError, match="request 0 of the batch has no new token"):
        Batch.build([BatchRequest([], [1])], PAGE_SIZE, shape=StepShape(1, 1, 1))


@pytest.mark.parametrize(
    ("requests", "shape", "message"),
    [
        (some([(0, 1)]), StepShape(ROWS + 1, 2), "has 49 rows, .* max_rows=48; make larger StepBuffers, or"),
        (some([(0, 1)]), StepShape(2, LOGITS + 1), "has 13 logits, .* max_logits=12"),
        (some([(3, 1)]), StepShape(9, 9, 9), "has 9 requests, .* max_requests=8"),
        (some([(3, 1)] * 9), StepShape(9, 9), "has 9 requests, .* max_requests=8"),
        (some([(40, 1)]), StepShape(2, 2), "has 11 pages for a request, .* max_pages=10"),
        (some([(3, 1)], spare=10), StepShape(2, 2, 2), "has 11 pages for a request"),
    ],
)
def test_buffers_too_small_are_refused_and_left_alone(requests, shape, message):
    memory = buffers()
    with pytest.raises(ValueError, match=message):
        Batch.build(requests, PAGE_SIZE, shape=shape, buffers=memory)
    assert not memory.page_tables[0].any()


@pytest.mark.parametrize(
    ("index", "name", "lowest"), [(0, "max_rows", 2), (1, "max_logits", 2), (2, "max_requests", 1), (3, "max_pages", 1)]
)
def test_buffers_of_no_size_are_refused(index, name, lowest):
    sizes = [2, 2, 1, 1]
    StepBuffers(*sizes, "cpu")
    sizes[index] = lowest - 1
    with pytest.raises(ValueError, match=f"need {name} of {lowest} at least; got {lowest - 1}"):
        StepBuffers(*sizes, "cpu")


def test_groups_of_layers_have_slots_and_tables_of_their_own_at_fixed_addresses():
    """And 0 where a page was given back: of the second group the first one."""
    fixed, seen = StepBuffers(ROWS, LOGITS, REQUESTS, PAGES, "cpu", num_groups=2), []
    for cached in (9, 14):
        columns = RequestColumns.of(some([(cached, 1), (2, 1)]))
        other = np.where(columns.page_table > 0, columns.page_table + 20, 0)
        other[0, 0] = 0
        columns.group_tables = other[None]
        batch = Batch.build(columns, PAGE_SIZE, shape=StepShape(4, 4, 4), buffers=fixed)
        first, second = batch.of_group(0), batch.of_group(1)
        changed = {"slots", "page_table", "page_table_host", "groups"}
        assert {name for name, value in vars(second).items() if value is not getattr(batch, name)} == changed and not second.groups
        width = columns.page_table.shape[1]
        assert first.page_table[:2, :width].tolist() == batch.page_table[:2, :width].tolist() == columns.page_table.tolist()
        assert second.page_table[:2, :width].tolist() == second.page_table_host[:2].tolist() == other.tolist()
        assert (second.slots - first.slots).tolist() == [20 * PAGE_SIZE] * 2 + [0] * 2
        assert first.seq_lens is second.seq_lens and not first.groups
        seen.append([(each.slots.data_ptr(), each.page_table.data_ptr()) for each in batch.groups])
        assert all(each.slots.storage_offset() * each.slots.itemsize % ALIGNMENT == 0 for each in batch.groups)
    assert seen[0] == seen[1] and [table for _, table in seen[0]] == [table.data_ptr() for table in fixed.page_tables]


@pytest.mark.parametrize("groups", [1, 3])
def test_other_groups_than_the_buffers_are_refused(groups):
    columns = RequestColumns.of(some([(9, 1)]))
    columns.group_tables = None if groups == 1 else np.stack([columns.page_table] * (groups - 1))
    fixed = StepBuffers(ROWS, LOGITS, REQUESTS, PAGES, "cpu", num_groups=2)
    with pytest.raises(
        ValueError, match="2 groups of layers, and the step has one page table" if groups == 1 else "of 3 groups of layers, but"
    ):
        Batch.build(columns, PAGE_SIZE, shape=StepShape(2, 2, 2), buffers=fixed)
