"""Plans for captured graphs: of static shape and place, refilled for each replay."""

import pytest
import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.kv_write.store import store_kv
from tests.backends.agreeing import REFERENCE, agree
from tests.backends.flashinfer.cases import F16, FakeEvent, graph_case, make_case
from tests.backends.problems import LAYER, close, copy_of, new_output, run


@pytest.mark.parametrize("feature", ["plain", "gqa_7", "windowed_sinks", "softcap"])
def test_a_graph_replays_other_batches(feature, backend):
    """What the first step launched, called again after later plans, gives the later steps' numbers."""
    graph, whole = backend.for_graph(max_requests=4, max_pages=64), [(20, 1), (30, 1), (7, 1), (9, 1)]
    pool = KVPool(graph_case(whole, feature).pool.layers, 64, 4, F16)
    for lengths in (whole, whole[1:3]):
        agree(graph_case(lengths, feature, pool=pool), graph, lse=True)
    captured = graph.plan(graph_case(whole, feature, pool=pool).batch, pool)
    launch = captured.launches[captured.layers.of_layer[LAYER]]
    addresses = [buffer.data_ptr() for buffer in vars(graph.buffers).values() if isinstance(buffer, torch.Tensor)]
    for lengths in ([(3, 1), (41, 1)], [(1, 1), (2, 1), (3, 1), (60, 1)]):
        case = graph_case(lengths, feature, seed=5, pool=pool)
        expected, _ = run(copy_of(case), REFERENCE)
        store_kv(pool, LAYER, case.key, case.value, case.batch)
        graph.plan(case.batch, pool)
        output = new_output(case)
        launch(case.query[:4].nan_to_num(), pool.key(LAYER), pool.value(LAYER), output[:4], None, case.sinks)
        close(output[: len(lengths)], expected[: len(lengths)], F16)
    assert addresses == [buffer.data_ptr() for buffer in vars(graph.buffers).values() if isinstance(buffer, torch.Tensor)]


def test_a_graphs_plan_waits_until_the_device_has_the_last_one(backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    graph, case = backend.for_graph(max_requests=4, max_pages=64), graph_case([(3, 1), (4, 1)])
    graph.plan(case.batch, case.pool)
    for slot in graph._slots.values():
        slot._copied = FakeEvent()
    for waits in (0, 1):
        assert [slot._copied.waits for slot in graph._slots.values()] == [waits, waits]
        graph.plan(case.batch, case.pool)
    assert not any(slot.is_copied for slot in graph._slots.values())


def test_what_a_graph_can_not_hold(backend):
    graph = backend.for_graph(max_requests=4, max_pages=8)
    case = graph_case([(3, 1), (4, 1)])
    with pytest.raises(UnsupportedError, match="max_pages=8; this batch needs 13"):
        graph.plan(graph_case([(20, 1), (16, 1)]).batch, case.pool)
    with pytest.raises(UnsupportedError, match="another pool"):
        graph.plan(case.batch, make_case([(3, 1)]).pool)
    with pytest.raises(UnsupportedError, match="got mode extend"):
        graph.plan(graph_case([(0, 4)]).batch, case.pool)
    with pytest.raises(UnsupportedError, match="max_requests=4; got 5 requests in 5 rows"):
        graph.plan(graph_case([(1, 1)] * 5).batch, case.pool)
    with pytest.raises(UnsupportedError, match="got 2 requests in 2 rows"):
        graph.plan(make_case([(1, 1)] * 2).batch, case.pool)
    with pytest.raises(ValueError, match="max_pages=3"):
        backend.for_graph(max_requests=4, max_pages=3)
