"""Timing on the CPU: what is counted, what is checked before it is timed, and that backends take turns."""

import dataclasses
import math
import time

import pytest
import torch

from benchmarks.kernels import time_writes
from paged_attn.attn_ops.batch.batch import ForwardMode
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.backends.attention.capabilities import Feature, unmet
from paged_attn.backends.attention.reference import ReferenceBackend
from paged_attn.backends.attention.torch_native import TorchNativeBackend
from paged_attn.backends.timing.inputs import Inputs, num_sets
from paged_attn.backends.timing.run import ROUNDS, Turn, sample_in_turns
from paged_attn.backends.timing.time_backends import TimedProblem, Timing, relative_error, row_attention, time_backends

CPU = torch.device("cpu")
SMALL = {"spec": AttentionSpec(4, 2, 16, 16, scale=0.25), "page_size": 4, "dtype": torch.float32}
DECODE = TimedProblem("decode", ((40, 1), (3, 1), (63, 1)), **SMALL)
PREFILL = TimedProblem("prefill", ((4, 7), (3, 1), (0, 9)), **SMALL)
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 5},
    "chunk": {"chunk": 6},
    "window_chunk": {"sliding_window": 4, "chunk": 7},
    "softcap": {"softcap": 1.5},
    "sinks": {"has_sinks": True},
    "alibi": {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
    "bidirectional": {"causal": False},
    "bidirectional_window": {"causal": False, "sliding_window": 5},
    "bidirectional_chunk": {"causal": False, "chunk": 6},
    "unequal_dims": {"v_head_dim": 8},
    "scale": {"scale": 0.7},
}


def of_layer(problem: TimedProblem, **changes) -> TimedProblem:
    return dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, **changes))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("problem", [DECODE, PREFILL], ids=lambda p: p.kind)
def test_the_device_reference_equals_the_oracle(problem, feature, monkeypatch):
    monkeypatch.setattr("paged_attn.backends.timing.time_backends.SCORE_BYTES", 4 * 4 * 4 * 16 * 3)  # three queries of 16 keys at once
    inputs = Inputs.make(of_layer(problem, **FEATURES[feature]), "cpu")
    inputs.store_new()
    layer = inputs.num_sets - 1
    plan, call = ReferenceBackend().plan(inputs.batch, inputs.pool), inputs.call(layer)
    ReferenceBackend().forward_extend(plan, call)
    expected = row_attention(inputs, layer)
    torch.testing.assert_close(call.output, expected, atol=1e-5, rtol=1e-5)
    assert relative_error(call.output, expected) < 1e-5


def test_shared_tokens_lie_in_the_same_pages_and_count_once():
    shared = dataclasses.replace(DECODE, requests=((40, 1), (20, 1), (63, 1)), shared=16)
    alone = dataclasses.replace(shared, shared=0)
    inputs = Inputs.make(shared, "cpu")
    tables = inputs.batch.page_table[:, :6]
    assert len(set(tables[:, :4].flatten().tolist())) == 4 and len(set(tables[:, 4:6].flatten().tolist())) == 6
    inputs.store_new()
    plan, call = ReferenceBackend().plan(inputs.batch, inputs.pool), inputs.call(0)
    ReferenceBackend().forward_extend(plan, call)
    assert relative_error(call.output, row_attention(inputs, 0)) < 1e-5
    assert alone.bytes_moved() - shared.bytes_moved() == alone.kv_bytes - shared.kv_bytes == 2 * 16 * 4 * 2 * 32
    with pytest.raises(ValueError, match="18 tokens cannot be shared by requests of 20 cached"):
        dataclasses.replace(shared, shared=18)


@pytest.mark.parametrize("feature", [f for f in FEATURES if f not in ("plain", "unequal_dims")])
def test_the_device_reference_sees_each_feature(feature):
    """Negative control: on the same numbers, the plain layer gives others."""
    inputs = Inputs.make(of_layer(PREFILL, **FEATURES[feature]), "cpu")
    inputs.store_new()
    with_feature = row_attention(inputs, 0)
    plain = dataclasses.replace(PREFILL.spec, kv_layer=0)
    inputs.pool.layers, inputs.sinks = (plain, *inputs.pool.layers[1:]), None
    assert relative_error(row_attention(inputs, 0), with_feature) > 1e-2


def visible(problem: TimedProblem, cached: int, new: int) -> list[list[int]]:
    spec, end = problem.spec, cached + new
    window, chunk = spec.sliding_window or 10**9, spec.chunk or 10**9
    return [
        [j for j in range(end if not spec.causal else i + 1) if i - window < j and i // chunk == j // chunk] for i in range(cached, end)
    ]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("problem", [DECODE, PREFILL], ids=lambda p: p.kind)
def test_operations_and_bytes_by_counting(problem, feature):
    problem = of_layer(problem, **FEATURES[feature])
    views = [visible(problem, *request) for request in problem.requests]
    dims = problem.spec.qk_head_dim + problem.spec.v_head_dim
    assert problem.flops == 2 * dims * 4 * sum(len(keys) for view in views for keys in view)
    keys = sum(len(set().union(*map(set, view))) for view in views)
    assert problem.bytes_moved() == 4 * (keys * 2 * dims + problem.num_tokens * 4 * dims)
    assert problem.bytes_moved(with_write=True) - problem.bytes_moved() == problem.bytes_written == 2 * 4 * problem.num_tokens * 2 * dims


def test_the_peers_numbers_come_out():
    """64 x 4,096 in 256 us is 4,190 GB/s; 1 x 8,192 x 8,192 at 561 TFLOP/s takes some 980 us."""
    decode = TimedProblem("decode", ((4095, 1),) * 64)
    assert decode.bytes_moved() / 256 * 1e-3 == pytest.approx(4190, rel=0.005)
    assert TimedProblem("prefill", ((0, 8192),)).flops == 4 * 32 * 128 * 8192 * 8193 // 2


@pytest.mark.parametrize(
    ("kind", "requests", "message"),
    [
        ("decode", (), "'decode' has 0 requests"),
        ("decode", ((4, 2),), r"\[\(4, 2\)\] are invalid"),
        ("decode", ((0, 1),), r"\[\(0, 1\)\] are invalid"),
        ("prefill", ((4, 0),), r"\[\(4, 0\)\] are invalid"),
        ("extend", ((4, 1),), "kind 'extend'"),
    ],
)
def test_problems_that_can_not_be(kind, requests, message):
    with pytest.raises(ValueError, match=message):
        TimedProblem(kind, requests)


@pytest.mark.parametrize(("problem", "phase"), [(DECODE, "decode"), (PREFILL, "extend")])
def test_a_backend_is_asked_for_the_phase_that_is_timed(problem, phase):
    """XQA, say, serves decode alone."""
    asked = problem.layer_problem(CPU)
    assert asked.phases == {phase} and asked.spec == problem.spec and asked.page_size == 4
    capabilities = dataclasses.replace(TorchNativeBackend.capabilities, phases=frozenset({phase}))
    assert not unmet(capabilities, asked)


def test_inputs_rotate_through_layers_on_random_pages_without_padding():
    inputs = Inputs.make(TimedProblem("decode", ((6, 1),), **SMALL), "cpu")
    assert (inputs.batch.mode, inputs.batch.num_rows, inputs.batch.num_tokens) == (ForwardMode.DECODE, 1, 1)
    assert [spec.kv_layer for spec in inputs.pool.layers] == list(range(inputs.num_sets)) and inputs.num_sets > 1
    assert not torch.equal(inputs.query[0], inputs.query[1])
    many = Inputs.make(DECODE, "cpu").batch
    for row in many.page_table.tolist()[::2]:
        assert row not in (sorted(row), sorted(row, reverse=True))
    used = {page for row in many.page_table.tolist() for page in row} - {0}
    pool = Inputs.make(DECODE, "cpu").pool
    pages_of_nan = {page for page in range(pool.num_pages) if pool.key(1)[page].isnan().all()}
    assert pages_of_nan == set(range(pool.num_pages)) - used and 0 in pages_of_nan


@pytest.mark.parametrize(
    ("kv_bytes", "set_bytes", "expected"),
    [(1 << 20, 1 << 20, 3), (100 << 20, 100 << 20, 2), (10**10, 10**10, 2), (10**10, 15 * 10**9, 1), (10**11, 10**11, 1)],
)
def test_sets_exceed_the_cache_but_not_memory(kv_bytes, set_bytes, expected):
    assert num_sets(kv_bytes, set_bytes, CPU) == expected


SLEEP = 0.004


class Recorder(TorchNativeBackend):
    """Counts calls, and can do something wrong."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong, self.calls, self.planned_in_graph = wrong, [], 0

    def plan_in_graph(self, plan):
        self.planned_in_graph += 1

    def forward(self, plan, layer_id, spec, query, key, value, output, *, save_kv_cache, **kwargs):
        self.calls.append((layer_id, save_kv_cache))
        if self.wrong == "raises":
            raise RuntimeError("no kernel")
        if self.wrong == "writes nothing":
            return
        if self.wrong == "sleeps":
            time.sleep(SLEEP)
        super().forward(plan, layer_id, spec, query, key, value, output, save_kv_cache=save_kv_cache, **kwargs)
        last = layer_id == len(plan.pool.layers) - 1
        if self.wrong == "last layer" and last:
            output[-1, -1] *= 1.001
        elif self.wrong == "nan" and last:
            output[0, 0, 0] = float("nan")
        elif self.wrong == "unwritten" and last:
            output[0].fill_(float("nan"))
        elif self.wrong == "spoils the pool":
            plan.pool.value(layer_id)[plan.slot_pages[0], plan.slot_offsets[0]] += 1

    def write_kv(self, plan, call):
        if self.wrong != "stores nothing":
            super().write_kv(plan, call)
        if self.wrong == "stores one wrong":
            plan.pool.key(call.layer_id)[plan.slot_pages[-1], plan.slot_offsets[-1], 0, 0] += 1


@pytest.mark.parametrize("problem", [DECODE, PREFILL, of_layer(DECODE, has_sinks=True)], ids=["decode", "prefill", "sinks"])
def test_a_time_for_each_that_is_right(problem):
    timings = time_backends({"b": TorchNativeBackend(), "a": ReferenceBackend()}, problem, min_ms=1, device="cpu")
    assert list(timings) == ["b", "a"]
    for timing in timings.values():
        assert timing.error is None and timing.relative_error < 1e-5 and not timing.graphed
        assert 0 < timing.min_microseconds <= timing.microseconds and timing.spread >= 0 and timing.samples >= ROUNDS[0]
        assert timing.gbytes_per_s == pytest.approx(problem.bytes_moved() / timing.microseconds / 1e3)
        assert timing.tflops == pytest.approx(problem.flops / timing.microseconds / 1e6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("last layer", "relative error 0.001 in layer 2 against the float32 reference; allowed is 0.0001"),
        ("nan", "relative error nan in layer 2"),
        ("unwritten", "relative error nan in layer 2"),
        ("writes nothing", "relative error nan in layer 0"),
        ("raises", "RuntimeError: no kernel"),
        ("spoils the pool", "K or V of new tokens is not in the pool in 3 places"),
    ],
)
def test_what_is_wrong_is_not_timed_and_harms_no_other(wrong, message):
    backends = {"before": Recorder(), "wrong": Recorder(wrong), "right": Recorder()}
    timings = time_backends(backends, DECODE, min_ms=1, device="cpu")
    assert list(timings) == list(backends)
    assert message in timings["wrong"].error and math.isnan(timings["wrong"].microseconds)
    assert len(backends["wrong"].calls) <= 3  # the check alone
    assert timings["right"].error is None and timings["right"].microseconds > 0


def test_what_does_not_fit_is_not_run():
    class NoWindow(Recorder):
        capabilities = dataclasses.replace(
            TorchNativeBackend.capabilities, features=TorchNativeBackend.capabilities.features - {Feature.WINDOW}
        )

    backend = NoWindow()
    timing = time_backends({"x": backend}, of_layer(DECODE, sliding_window=3), min_ms=1, device="cpu")["x"]
    assert timing.error == "no sliding window" and not backend.calls


@pytest.mark.parametrize("with_write", [False, True])
def test_the_write_is_timed_only_if_asked_for(with_write):
    backend = Recorder()
    timing = time_backends({"x": backend}, DECODE, min_ms=1, device="cpu", with_write=with_write)["x"]
    assert timing.error is None and {save for _, save in backend.calls} == {with_write}
    assert timing.gbytes_per_s == pytest.approx(DECODE.bytes_moved(with_write) / timing.microseconds / 1e3)


@pytest.mark.parametrize("wrong", ["stores nothing", "stores one wrong"])
def test_a_wrong_write_is_found(wrong):
    assert "not in the pool in" in time_backends({"x": Recorder(wrong)}, DECODE, min_ms=1, device="cpu", with_write=True)["x"].error
    backends = {"right": Recorder(), "wrong": Recorder(wrong)}
    timings = time_writes(backends, DECODE, min_ms=1, device=CPU)
    assert timings["right"].error is None
    assert "rows were not stored as they were given" in timings["wrong"].error


def test_a_time_is_that_of_one_layer():
    timing = time_backends({"x": Recorder("sleeps")}, DECODE, min_ms=1, device="cpu")["x"]
    assert SLEEP * 1e6 <= timing.min_microseconds < 2 * SLEEP * 1e6


def test_writes():
    timings = time_writes({"a": TorchNativeBackend(), "b": ReferenceBackend()}, PREFILL, min_ms=1, device=CPU)
    for timing in timings.values():
        assert timing.error is None
        assert timing.gbytes_per_s == pytest.approx(2 * 17 * 2 * 32 * 4 / timing.microseconds / 1e3)


def test_the_numbers_of_a_timing():
    turn = Turn(print, print, 1, 1.0, graphed=True, samples=[60.0, 20.0, 44.0, 40.0, 40.0, 36.0, 40.0, 40.0, 40.0, 40.0, 40.0])
    timing = Timing.of(turn, layers=2, num_bytes=4000, flops=10**9, error=0.25)
    assert (timing.microseconds, timing.min_microseconds, timing.samples, timing.graphed) == (20.0, 10.0, 11, True)
    assert timing.spread == pytest.approx((22.0 - 18.0) / 20.0)
    assert (timing.gbytes_per_s, timing.tflops, timing.relative_error) == pytest.approx((0.2, 50.0, 0.25))


@pytest.mark.parametrize("in_graph_plan", [False, True])
def test_plan_in_graph_is_timed_only_if_asked_for(in_graph_plan):
    backend = Recorder()
    time_backends({"x": backend}, DECODE, min_ms=1, device="cpu", in_graph_plan=in_graph_plan)
    passes = len(backend.calls) // 3
    assert backend.planned_in_graph == 1 + passes * in_graph_plan


def test_backends_take_turns_and_slow_ones_drop_out_first():
    order = []
    turns = {name: Turn(print, lambda name=name: order.append(name), 1, ms, False) for name, ms in (("a", 1.0), ("b", 100.0), ("c", 2.0))}
    sample_in_turns(turns, CPU, min_ms=20)
    assert order[: 3 * ROUNDS[0]] == ["a", "b", "c"] * ROUNDS[0]
    assert {name: len(turn.samples) for name, turn in turns.items()} == {"a": 20, "b": ROUNDS[0], "c": 10}


def test_a_short_function_runs_several_times_in_a_sample():
    count = []
    turn = Turn.of(lambda: count.append(0), CPU, graphed=False)
    before = len(count)
    turn.run()
    assert len(count) - before == turn.passes > 1


def test_a_long_function_runs_once_in_a_sample():
    assert Turn.of(lambda: time.sleep(0.01), CPU, graphed=False).passes == 1


class FakeGPU:
    """Stands in for torch.cuda: graphs that record what is captured, and events that read a clock of calls."""

    def __init__(self, fails: bool = False) -> None:
        self.log, self.clock, self.fails, self.capturing = [], 0.0, fails, False

    def install(self, monkeypatch) -> None:
        gpu = self

        class Graph:
            def __init__(self) -> None:
                self.calls = 0

            def replay(self) -> None:
                gpu.log.append(("replay", self.calls))
                gpu.rests = False
                gpu.clock += 0.5 * self.calls

        class Capture:
            def __init__(self, graph) -> None:
                self.graph = graph

            def __enter__(self) -> None:
                gpu.capturing, gpu.stream, self.before = True, "capture's", len(gpu.log)

            def __exit__(self, *error) -> None:
                gpu.capturing = False
                self.graph.calls = len(gpu.log) - self.before
                if not gpu.fails:
                    gpu.stream = "usual"

        class Event:
            def __init__(self, enable_timing) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.clock

            def elapsed_time(self, other) -> float:
                assert gpu.rests, "read before the GPU has come to rest"
                return other.at - self.at

        gpu.stream, gpu.rests = "usual", False
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", Capture)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: setattr(gpu, "rests", True))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(gpu, "stream", stream))

    def function(self) -> None:
        if self.capturing and self.fails:
            raise RuntimeError("cannot be captured")
        self.log.append("ran while capturing" if self.capturing else "ran")


def test_on_a_gpu_graphs_are_replayed_between_events(monkeypatch):
    gpu = FakeGPU()
    gpu.install(monkeypatch)
    turn = Turn.of(gpu.function, torch.device("cuda"), graphed=True)
    assert turn.graphed and gpu.log.count("ran while capturing") == turn.passes > 1
    del gpu.log[:]
    sample_in_turns({"a": turn}, torch.device("cuda"), min_ms=0)
    assert gpu.log == [("replay", turn.passes)] * ROUNDS[0]
    assert turn.samples == [500.0] * ROUNDS[0]  # half a millisecond per call


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch):
    gpu = FakeGPU(fails=True)
    gpu.install(monkeypatch)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        Turn.of(gpu.function, torch.device("cuda"), graphed=True)
    assert gpu.stream == "usual"


def test_a_turn_keeps_the_function_alive_whose_memory_the_graph_uses(monkeypatch):
    gpu = FakeGPU()
    gpu.install(monkeypatch)
    assert Turn.of(gpu.function, torch.device("cuda"), graphed=True).function == gpu.function
