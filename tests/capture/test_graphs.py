"""Sizes, addresses and the set of graphs, without a model: steps of a few operations on a recorder that notes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paged_attn.attn_ops.errors import CaptureError
from paged_attn.capture.graphs.buckets import BucketSizes, bucket_sizes, coarse_to_fine
from paged_attn.capture.graphs.graph_set import CaptureSpec, GraphKey, GraphSet
from paged_attn.capture.graphs.pointer_check import PointerCheck
from tests.capture.tape import TapeRecorder


@given(st.integers(1, 20_000), st.integers(1, 60), st.integers(1, 16))
def test_buckets_reach_from_the_smallest_to_the_largest(largest: int, count: int, smallest: int) -> None:
    sizes = bucket_sizes(largest, count, smallest)
    assert sizes == sorted(set(sizes)) and len(sizes) <= max(count, 1)
    assert sizes[-1] == max(largest, smallest) and all(size >= min(smallest, largest) for size in sizes)
    assert all(size % 8 == 0 for size in sizes[:-1] if 8 < size <= 256) and all(size % 64 == 0 for size in sizes[:-1] if size > 256)


def test_no_step_is_padded_by_much_more_than_its_share() -> None:
    sizes = bucket_sizes(2048, 20)
    assert all(after / before <= 1.75 for before, after in pairwise(sizes) if before >= 16)


@given(st.sets(st.integers(1, 500), max_size=40), st.integers(0, 600))
def test_the_smallest_that_holds_it(sizes: set[int], wanted: int) -> None:
    assert BucketSizes(sizes).fit(wanted) == min((size for size in sizes if size >= wanted), default=None)


@given(st.sets(st.integers(1, 500), min_size=1, max_size=40))
def test_coarse_to_fine_is_the_same_sizes_with_both_ends_first(sizes: set[int]) -> None:
    order = coarse_to_fine(list(sizes))
    assert sorted(order) == sorted(sizes) and order[0] == max(sizes) and min(sizes) in order[:2]
    cut = sorted(order[: max(len(order) // 2, 1)])
    gaps = [sum(low < size < high for size in sizes) for low, high in pairwise(cut)]
    assert not gaps or max(gaps) <= 2 * len(sizes) / len(gaps), "cut off anywhere, what is there is spread evenly"


def test_tensors_that_moved_were_replaced_or_are_gone_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    check = PointerCheck(model, [model[1].running_mean.detach()])  # as torch.compile binds it: its memory, in another object
    assert len(check) == 5
    with torch.no_grad():
        model[0].weight.fill_(2.0)  # numbers written in place
    model[1].running_var = torch.ones(3)  # not bound
    check.check()
    kept = model[0].weight
    model[0].weight = nn.Parameter(kept.detach().clone())
    with pytest.raises(CaptureError, match=r"0\.weight was replaced by another tensor"):
        check.check()
    model[0].weight = kept
    check.check()
    model[0].bias.data = torch.zeros(3)
    with pytest.raises(CaptureError, match=r"0\.bias moved to another address"):
        check.check()
    model[0].bias = None
    with pytest.raises(CaptureError, match=r"0\.bias is gone"):
        check.check()


class Steps:
    """`size` rows are doubled, by an operation that a break may stand for."""

    def __init__(self, fail: int | None = None) -> None:
        self.inputs = torch.zeros(64)
        self.fail = fail

    @contextmanager
    def prepare(self, key: GraphKey) -> Iterator[CaptureSpec]:
        def run() -> Tensor:
            rows = self.inputs[: key.size] * 2
            if key.size == self.fail:
                raise RuntimeError("no room on the device\nand more lines")
            return torch.sin(rows) + 1

        yield CaptureSpec(run, lambda op: op is torch.ops.aten.sin.default, [self.inputs], state=key.size)


def keys(*sizes: int) -> list[GraphKey]:
    return [GraphKey("piecewise", size) for size in sizes]


def captured(graphs: GraphSet, prepare: Any, *sizes: int) -> GraphSet:
    assert list(graphs.capture(keys(*sizes), prepare)) == keys(*sizes)
    return graphs


def test_a_replay_computes_from_what_the_inputs_hold_now() -> None:
    steps = Steps()
    graphs = captured(GraphSet(TapeRecorder(), budget=10**6), steps.prepare, 8, 4)
    assert graphs.sizes("piecewise") == [4, 8] and graphs.sizes("full") == [] and not graphs.refused
    for size in (8, 4):
        found = graphs.captured[GraphKey("piecewise", size)]
        assert (found.state, found.segments.num_graphs, found.segments.num_calls) == (size, 2, 1)
        steps.inputs.copy_(torch.arange(64.0))
        found.segments.replay()
        assert torch.equal(found.segments.output, torch.sin(torch.arange(float(size)) * 2) + 1)


def test_a_budget_leaves_out_what_does_not_fit_and_says_so() -> None:
    recorder = TapeRecorder(bytes_per_graph=1 << 20)
    graphs = captured(GraphSet(recorder, budget=5 << 20), Steps().prepare, 16, 8, 4)  # two graphs each
    assert graphs.sizes("piecewise") == [8, 16] and graphs.nbytes == 4 << 20
    assert graphs.refused[GraphKey("piecewise", 4)] == "it would add 2 MiB to 4 MiB of graphs; 5 MiB are allowed"
    assert len(recorder.tapes) == 4, "what was refused was given back"
    graphs.clear()
    assert graphs.nbytes == 0 and not recorder.tapes and not graphs.captured


def test_a_shape_that_fails_is_left_out_with_the_first_line_of_the_reason() -> None:
    recorder = TapeRecorder()
    graphs = captured(GraphSet(recorder, budget=10**9), Steps(fail=8).prepare, 16, 8, 4)
    assert graphs.refused == {GraphKey("piecewise", 8): "RuntimeError: no room on the device"}
    assert graphs.sizes("piecewise") == [4, 16] and recorder.open is None
    with pytest.raises(CaptureError, match=r"the graph piecewise 8 cannot be captured: RuntimeError: no room on the device\. Without"):
        captured(GraphSet(TapeRecorder(), budget=10**9, strict=True), Steps(fail=8).prepare, 16, 8)


def test_an_op_that_can_not_be_recorded_runs_between_the_graphs_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TapeRecorder()
    call = recorder.call

    def failing(function: Any, *args: Any) -> Any:
        if function is torch.ops.aten.add.Tensor:
            raise RuntimeError("not while capturing")
        return call(function, *args)

    monkeypatch.setattr(recorder, "call", failing)
    graphs = captured(GraphSet(recorder, budget=10**9), Steps().prepare, 8, 4)
    assert graphs.unsafe == {torch.ops.aten.add.Tensor: "RuntimeError: not while capturing"} and not graphs.refused
    assert {found.segments.num_calls for found in graphs.captured.values()} == {2}


class Together:
    """Two processes as threads: `agree` and `run` wait for each other, and for nothing else of the other."""

    def __init__(self) -> None:
        self._barrier, self._said = threading.Barrier(2, timeout=10), [True, True]
        self.runs: list[list[GraphKey]] = [[], []]

    def agree(self, rank: int, mine: bool) -> bool:
        self._said[rank] = mine
        self._barrier.wait()
        answer = all(self._said)
        self._barrier.wait()
        return answer

    def captured(self, rank: int, steps: Steps, recorder: TapeRecorder, fails: frozenset[int]) -> GraphSet:
        @contextmanager
        def prepare(key: GraphKey) -> Iterator[CaptureSpec]:
            if key.size in fails:
                raise CaptureError("not on this one")
            with steps.prepare(key) as spec:

                def run() -> Any:
                    self.runs[rank].append(key)
                    self._barrier.wait()  # as a sum over all ranks does
                    return spec.run()

                yield replace(spec, run=run)

        return captured(GraphSet(recorder, budget=10**9, agree=lambda mine: self.agree(rank, mine)), prepare, 16, 8, 4)


@pytest.mark.parametrize("case", ["one cannot prepare a shape", "one cannot record an op"])
def test_processes_run_together_or_not_at_all(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, recorders = Together(), [TapeRecorder(), TapeRecorder()]
    if case == "one cannot record an op":
        call = recorders[1].call

        def failing(function: Any, *args: Any) -> Any:
            if function is torch.ops.aten.add.Tensor:
                raise RuntimeError("not while capturing")
            return call(function, *args)

        monkeypatch.setattr(recorders[1], "call", failing)
        fails = [frozenset[int](), frozenset[int]()]
    else:
        fails = [frozenset[int](), frozenset({8})]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda rank: together.captured(rank, Steps(), recorders[rank], fails[rank]), (0, 1))
    assert together.runs[0] == together.runs[1] and one.sizes("piecewise") == two.sizes("piecewise")
    if case == "one cannot prepare a shape":
        assert one.sizes("piecewise") == [4, 16] and "another process" in one.refused[GraphKey("piecewise", 8)]
        assert "not on this one" in two.refused[GraphKey("piecewise", 8)]
    else:
        assert one.sizes("piecewise") == [4, 8, 16] and list(two.unsafe) == [torch.ops.aten.add.Tensor] and not one.unsafe


def test_processes_capture_what_all_of_them_have_room_for() -> None:
    tried = [True] * 5  # before and after the run, recorded, and kept
    answers = iter([*tried, False, *tried[1:], False])  # the second shape another process does not try, the third it has no room for
    graphs = captured(GraphSet(TapeRecorder(), budget=10**9, agree=lambda mine: mine and next(answers)), Steps().prepare, 16, 8, 4)
    assert graphs.sizes("piecewise") == [16]
    assert {key.size for key in graphs.refused} == {8, 4} and all("another process" in why for why in graphs.refused.values())
