"""Plans, the wrappers that they own, the tables that they hold, and what is logged before a kernel compiles."""

import logging
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.backends.attention.flashinfer import wrappers
from paged_attn.backends.attention.flashinfer.backend import FlashInferBackend
from paged_attn.backends.attention.flashinfer.tables import HostLens, Part, tables_of
from paged_attn.backends.attention.flashinfer.wrappers import WrapperPool, announce
from tests.backends.agreeing import REFERENCE, agree
from tests.backends.flashinfer.cases import F16, FRESH, LEADING, MODES, FakeEvent, make_case, shared_case, spec_of
from tests.backends.problems import LAYER, close, copy_of, new_output, run


def test_one_plan_per_kind_and_step_made_before_the_model_runs(counts, backend):
    case = make_case(MODES[ForwardMode.DECODE])
    for step in (1, 2):
        with ForwardContext(case.batch, case.pool, backend):
            assert counts == {"made": 2, "planned": 2 * step}  # layers 0 and 1 are of one kind, layer 2 of another
            for layer in (0, 1):
                UNIFIED_ATTENTION(case.query, case.key, case.value, new_output(case), layer, True)
        assert counts == {"made": 2, "planned": 2 * step}


def test_a_layer_that_reads_anothers_kv_is_planned_for_the_pool(counts, backend):
    """The first prompts of a model that shares KV: the owner reads the step's own K and V, the sharer the pool's."""
    case = make_case(FRESH)
    pool = KVPool([spec_of(kv_layer=0), spec_of(kv_layer=0)], case.pool.num_pages, case.pool.page_size, F16)
    backend.plan(case.batch, pool)
    assert counts == {"made": 2, "planned": 2}


def test_a_cascade_plans_twice(counts, eager_cascade, backend):
    backend.plan(shared_case().batch, shared_case().pool)
    assert counts == {"made": 4, "planned": 4}


def test_contexts_nest(backend):
    """A draft model's step inside a target's step, on one backend: the outer plan must survive."""
    outer, inner = make_case(MODES[ForwardMode.DECODE]), make_case([(3, 1), (20, 1)], seed=1)
    expected, _ = run(copy_of(outer), REFERENCE)
    output = new_output(outer)
    with ForwardContext(outer.batch, outer.pool, backend):
        agree(inner, backend)
        UNIFIED_ATTENTION(outer.query, outer.key, outer.value, output, LAYER, True)
    close(output, expected, F16)


def test_a_wrapper_is_not_planned_again_before_the_device_has_its_plan(monkeypatch):
    monkeypatch.setattr(wrappers, "_device_key", lambda device: ())
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    pool, device = WrapperPool(), torch.device("cuda")

    class Plan:
        pass

    def step():
        plan = Plan()
        slot = pool.take("key", plan, device, Mock)
        slot.plan()
        return slot

    ahead = [step() for _ in range(wrappers.SLOTS)]
    assert len(set(ahead)) == wrappers.SLOTS
    for oldest in ahead[:2]:
        assert step() is oldest and oldest._copied.waits == 1, "the host waits for the oldest"
    ahead[0]._copied.reached = True
    assert step() is ahead[0] and ahead[0]._copied.waits == 1 and ahead[2]._copied.waits == 0


def test_plans_that_live_have_wrappers_of_their_own_and_one_workspace(backend):
    case = make_case(LEADING)
    plans = [backend.plan(case.batch, case.pool) for _ in range(8)]  # all alive: 4 wrappers each
    assert sum(map(len, backend.wrappers._slots.values())) == 4 * len(plans)
    assert [buffer.numel() for buffer in backend.wrappers._workspaces.values()] == [wrappers.MIN_WORKSPACE]


def test_a_plan_owns_its_wrappers():
    pool, device = WrapperPool(), torch.device("cpu")

    class Plan:
        pass

    first, second = Plan(), Plan()
    slot = pool.take("key", first, device, object)
    assert pool.take("key", second, device, object) is not slot
    del first
    assert pool.take("key", Plan(), device, object) is slot


def test_a_workspace_is_shared_until_it_is_too_small():
    pool, device = WrapperPool(), torch.device("cpu")
    small = pool.workspace(device, 10)
    assert small.numel() == wrappers.MIN_WORKSPACE and pool.workspace(device, 20) is small
    assert pool.workspace(device, small.numel() + 1).numel() == small.numel() + 1


@pytest.mark.parametrize("lengths", [[(9, 1), (40, 1), (17, 1)], [(9, 1)] * 3, [(0, 30)], [(3, 9), (0, 1)]], ids=str)
def test_tables(lengths):
    batch = make_case(lengths, page_size=16).batch
    part = Part(0, len(lengths), 0, batch.num_tokens, False, False)
    tables = tables_of(batch, part)
    needs = [-(-(c + n) // 16) for c, n in lengths]
    assert tables.kv_indices.tolist() == [p for row, need in zip(batch.page_table.tolist(), needs, strict=True) for p in row[:need]]
    assert tables.kv_indptr.tolist() == np.cumsum([0, *needs]).tolist()
    assert tables.qo_indptr.tolist() == batch.query_start.tolist()
    assert tables.last_page_len.tolist() == [(c + n - 1) % 16 + 1 for c, n in lengths]
    assert tables.seq_lens.tolist() == list(batch.seq_lens_host)
    assert tables.longest_query == max(batch.query_lens_host)


def test_tables_of_some_requests_without_their_first_pages():
    batch = make_case([(9, 1), (40, 1), (17, 1)], page_size=4).batch
    tables = tables_of(batch, Part(1, 3, 1, 3, True, False), skip=2)
    rows = batch.page_table.tolist()
    assert tables.kv_indices.tolist() == rows[1][2:11] + rows[2][2:5]
    assert tables.kv_indptr.tolist() == [0, 9, 12] and tables.last_page_len.tolist() == [1, 2] and tables.seq_lens.tolist() == [33, 10]


def test_tables_for_more_requests_than_there_are():
    batch = make_case([(9, 1), (3, 1)], page_size=4).batch
    tables = tables_of(batch, Part(0, 2, 0, 2, True, False), requests=4)
    rows = batch.page_table.tolist()
    assert tables.kv_indices.tolist() == [*rows[0][:3], rows[1][0], 0, 0] and tables.kv_indptr.tolist() == [0, 3, 4, 5, 6]
    assert tables.seq_lens.tolist() == [10, 4, 1, 1] and tables.last_page_len.tolist() == [2, 4, 1, 1]
    assert tables.qo_indptr.tolist() == [0, 1, 2, 3, 4]


def test_pythons_max_looks_at_one_length():
    lens = torch.tensor([3, 9, 4], dtype=torch.int32).as_subclass(HostLens)
    assert len(list(lens.cpu().flatten())) == 1 and max(lens.cpu().flatten()).item() == 9
    assert isinstance(tables_of(make_case([(3, 1)]).batch, Part(0, 1, 0, 1, True, False)).seq_lens, HostLens)


def test_a_log_line_before_what_may_compile(backend, caplog):
    wrappers._announced.clear()
    with caplog.at_level(logging.INFO, "paged_attn"):
        for _ in range(2):
            agree(make_case(MODES[ForwardMode.DECODE]), backend)
        agree(make_case(FRESH, "windowed_sinks"), FlashInferBackend(prefill="fa3"))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and "decode kernel for head dim 64, float16;" in lines[0] and "about 25 s" in lines[0]
    assert any("fa3 kernel for head dim 64, float16, window, sinks" in line and "about 94 s" in line for line in lines)


def test_an_unknown_compile_time_is_said_so(caplog):
    with caplog.at_level(logging.INFO, "paged_attn"):
        announce("new kernel", "something")
    assert "may take minutes" in caplog.text
