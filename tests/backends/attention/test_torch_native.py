"""torch_native against the float32 oracle, on ragged batches whose unused memory is poisoned."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.attention.base import AttentionCall
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from tests.backends.agreeing import agree as agree_with_oracle
from tests.backends.problems import (
    FEATURES,
    LAYER,
    LAYOUTS,
    NAN,
    STRIDES,
    bits,
    close,
    copy_of,
    make,
    new_output,
    run,
    spec_of,
)

NATIVE, REFERENCE = TorchNativeBackend(), ReferenceBackend()
MODES = {
    ForwardMode.EXTEND: [(0, 7), (0, 1), (0, 18), (9, 4)],
    ForwardMode.DECODE: [(1, 1), (15, 1), (16, 1), (30, 1)],
    ForwardMode.MIXED: [(17, 1), (0, 1), (6, 5), (33, 1), (0, 9)],
}
SHARED = [(40, 1), (33, 3), (32, 1)]  # at least two full pages of 16 in common


def agree(case, *, lse=False, save=True):
    agree_with_oracle(case, NATIVE, lse=lse, save=save)


@pytest.mark.parametrize("lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_in_every_mode(feature, mode, lse):
    case = make(MODES[mode], spec_of(feature), page_size=4, extra_rows=3)
    assert case.batch.mode is mode
    agree(case, lse=lse)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feature", ["plain", "all"])
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_dtypes(mode, feature, dtype):
    agree(make(MODES[mode], spec_of(feature), page_size=4, dtype=dtype), lse=feature == "all")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_layouts(page_size, layout):
    agree(make(SHARED if layout == "shared" else MODES[ForwardMode.MIXED], page_size=page_size, layout=layout))


def test_layouts_are_what_they_say():
    tables = {layout: make(SHARED, page_size=16, layout=layout).batch.page_table.tolist() for layout in LAYOUTS}
    assert tables["interleaved"] == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]
    assert all(row == sorted(row, reverse=True) for row in tables["descending"])
    assert any(row not in (sorted(row), sorted(row, reverse=True)) for row in tables["shuffled"])
    assert len({tuple(row[:2]) for row in tables["shared"]}) == 1 and len({row[2] for row in tables["shared"]}) == 3


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("new", [1, 2])
def test_lengths_around_page_edges(page_size, new):
    ends = {edge + d for edge in (page_size, 2 * page_size) for d in (-1, 0, 1)}
    agree(make([(end - new, new) for end in sorted(ends) if end >= new], page_size=page_size))


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("feature", ["plain", "softcap"])
def test_odd_strides(strides, feature):
    agree(make(MODES[ForwardMode.MIXED], spec_of(feature), page_size=4, strides=strides, extra_rows=2))


@pytest.mark.parametrize("strides", STRIDES)
def test_output_may_have_odd_strides(strides):
    case = make(MODES[ForwardMode.MIXED], page_size=4, extra_rows=2)
    expected, _ = run(copy_of(case), REFERENCE)
    output = new_output(case, strides)
    with ForwardContext(case.batch, case.pool, NATIVE):
        UNIFIED_ATTENTION(case.query, case.key, case.value, output, LAYER, True)
    close(output, expected)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.sampled_from([0, 0, 1, 3, 7, 15, 16, 17, 31]), st.integers(1, 6)), min_size=1, max_size=5),
    feature=st.sampled_from(sorted(FEATURES)),
    page_size=st.sampled_from([1, 2, 16, 64]),
    layout=st.sampled_from(LAYOUTS),
    strides=st.sampled_from(STRIDES),
    extra_rows=st.integers(0, 3),
    lse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch(lengths, feature, page_size, layout, strides, extra_rows, lse, seed):
    case = make(
        lengths, spec_of(feature), page_size=page_size, layout=layout, strides=strides, extra_rows=extra_rows, seed=seed
    )  # fmt: skip
    agree(case, lse=lse)


def test_a_prompt_in_chunks_equals_the_prompt_at_once():
    whole = make([(0, 21)], page_size=4)
    expected, _ = run(whole, NATIVE)
    pieces = []
    for start, end in ((0, 6), (6, 7), (7, 8), (8, 21)):
        case = make([(start, end - start)], page_size=4)
        case.query, case.key, case.value = (torch.cat([t[start:end], t[:1] * NAN])[: max(2, end - start)]
                                            for t in (whole.query, whole.key, whole.value))  # fmt: skip
        kept = whole.batch.page_table[:, : case.batch.page_table.shape[1]]
        slots = whole.batch.slots[start:end]
        case.batch = dataclasses.replace(
            case.batch, page_table=kept, slots=torch.cat([slots, slots[:0].new_zeros(2)])[: case.batch.num_rows]
        )
        if start == 0:
            case.pool.storage.fill_(NAN)
            pool = case.pool = KVPool(whole.pool.layers, whole.pool.num_pages, 4, torch.float32)
            pool.storage.fill_(NAN)
        case.pool = pool
        pieces.append(run(case, NATIVE)[0][: end - start])
    close(torch.cat(pieces), expected)


def test_a_prompt_of_one_token_returns_its_value():
    case = make([(0, 1)])
    output, _ = run(case, NATIVE)
    close(output[0], case.dense_values[0][0].repeat_interleave(case.spec.group_size, 0))
    assert output.shape[0] == 2 and not output[1].any()


@pytest.mark.parametrize("backend", [NATIVE, REFERENCE], ids=lambda b: b.name)
def test_an_idle_step_gives_zeros_and_stores_nothing(backend):
    case = make([(0, 2)], extra_rows=0)
    case.batch = type(case.batch).build([], case.pool.page_size)
    before = bits(case.pool.storage).clone()
    output, lse = run(case, backend, lse=True)
    assert (case.batch.mode, output.shape[0]) == (ForwardMode.IDLE, 2)
    assert torch.equal(output, torch.zeros_like(output)) and torch.equal(lse, torch.zeros_like(lse))
    assert torch.equal(bits(case.pool.storage), before)


@pytest.mark.parametrize("backend", [NATIVE, REFERENCE], ids=lambda b: b.name)
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.value)
def test_only_the_steps_slots_change(backend, mode):
    case = make(MODES[mode], page_size=4, extra_rows=3, strides="sliced")
    expected = copy_of(case).pool
    for row in range(case.batch.num_tokens):
        slot = int(case.batch.slots[row])
        expected.key(LAYER)[slot // 4, slot % 4] = case.key[row]
        expected.value(LAYER)[slot // 4, slot % 4] = case.value[row]
    assert not torch.equal(bits(case.pool.storage), bits(expected.storage))
    run(case, backend)
    assert torch.equal(bits(case.pool.storage), bits(expected.storage))


@pytest.mark.parametrize("backend", [NATIVE, REFERENCE], ids=lambda b: b.name)
def test_a_layer_that_shares_kv_reads_but_does_not_write(backend):
    case = make(MODES[ForwardMode.MIXED], page_size=4)
    first, _ = run(case, NATIVE)
    sharing = dataclasses.replace(case.spec, kv_layer=LAYER)
    pool = KVPool([case.pool.layers[0], case.spec, sharing], case.pool.num_pages, 4, torch.float32)
    pool.key(LAYER).copy_(case.pool.key(LAYER))
    pool.value(LAYER).copy_(case.pool.value(LAYER))
    before = bits(pool.storage).clone()
    case.pool, case.key, case.value = pool, case.key * NAN, case.value * NAN
    output, _ = run(case, backend, save=False, layer=2)
    close(output, first)
    assert torch.equal(bits(pool.storage), before)


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float64])
def test_a_pool_of_another_dtype(pool_dtype):
    case = make(MODES[ForwardMode.MIXED], page_size=4)
    pool = KVPool(case.pool.layers, case.pool.num_pages, 4, pool_dtype)
    pool.storage.copy_(case.pool.storage)
    case.pool = pool
    expected, _ = run(copy_of(case), REFERENCE)
    output, _ = run(case, NATIVE)
    assert output.dtype == torch.float32
    close(output, expected)


@pytest.mark.parametrize("feature", ["plain", "softcap", "sinks"])
def test_float16_scores_do_not_overflow_before_the_scale(feature):
    """q.k reaches 120,000 here; float16 ends at 65,504."""
    case = make([(5, 1), (0, 3)], dataclasses.replace(spec_of(feature), scale=1e-4), dtype=torch.float16)
    case.query = case.query.sign() * 120
    case.pool.key(LAYER).sign_().mul_(120)
    case.key = case.key.sign() * 120
    agree(case)


class CallCounter(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def calls_of(forward: str, requests: int, length: tuple[int, int], feature: str, lse: bool) -> int:
    case = make([length] * requests, spec_of(feature))
    run(case, NATIVE)  # so that nothing is NaN
    plan, output = NATIVE.plan(case.batch, case.pool), new_output(case)
    lse_out = output.new_empty(output.shape[:2]) if lse else None
    with CallCounter() as counter:
        call = AttentionCall(LAYER, case.spec, case.query, case.key, case.value, output, case.sinks, lse_out, case.bias)
        getattr(NATIVE, forward)(plan, call)
    return counter.calls


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("feature", ["plain", "window_chunk", "all"])
def test_decode_makes_as_many_calls_for_64_requests_as_for_2(feature, lse):
    few, many = (calls_of("forward_decode", n, (20, 1), feature, lse) for n in (2, 64))
    assert few == many > 0


def test_the_counter_sees_a_loop_over_requests():
    """Negative control: extend does loop."""
    assert calls_of("forward_extend", 8, (0, 3), "plain", False) > calls_of("forward_extend", 2, (0, 3), "plain", False)


def test_a_whole_decode_step_has_no_loop_over_requests():
    counts = []
    for requests in (2, 64):
        case = make([(20, 1)] * requests)
        output = new_output(case)
        with CallCounter() as counter:
            NATIVE.forward(
                NATIVE.plan(case.batch, case.pool), LAYER, case.spec, case.query, case.key, case.value, output, save_kv_cache=True
            )
        counts.append(counter.calls)
    assert counts[0] == counts[1]


class LargestNew(TorchDispatchMode):
    """Elements of the largest tensor that is not a view of the pool."""

    def __init__(self, pool):
        super().__init__()
        self.pool, self.largest = pool.storage.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self.pool:
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("feature", ["plain", "all"])
def test_a_step_copies_no_pool(feature):
    case = make(MODES[ForwardMode.MIXED], spec_of(feature), page_size=4)
    large = KVPool(case.pool.layers, 4096, 4, torch.float32)
    output = new_output(case)
    with LargestNew(large) as seen:
        plan = NATIVE.plan(case.batch, large)
        operands = (case.query, case.key, case.value, output)
        NATIVE.forward(plan, LAYER, case.spec, *operands, save_kv_cache=True, sinks=case.sinks, bias=case.bias, lse_out=None)
    assert 0 < seen.largest < large.key(LAYER).numel() // 10


def test_layers_with_the_same_mask_share_one_gather():
    case = make(MODES[ForwardMode.DECODE], page_size=4)
    gathers = []
    with ForwardContext(case.batch, case.pool, NATIVE) as context:
        for layer in (0, 1):
            UNIFIED_ATTENTION(case.query, case.key, case.value, new_output(case), layer, True)
            gathers += context.plan.decode.values()
    assert len(gathers) == 2 and gathers[0] is gathers[1]
