"""Kernels are compiled before they are launched: all of them, once, and a launch waits for them."""

from __future__ import annotations

import logging
import pickle
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from paged_attn.attn_ops.ops.experts import EXPERTS, ONE_BY_ONE
from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.compiling import compile_ahead
from paged_attn.backends.compiling.compile_job import CompilingDriver
from paged_attn.backends.experts.one_by_one import OneByOneBackend
from paged_attn.backends.experts.triton.grouped import ONE_PROGRAM, tiling_for, token_counts
from paged_attn.compiled.experts_ahead import compile_graph_ahead
from paged_attn.engine.tracing.experts_as_ops import experts_as_ops
from tests.backends.experts.operands import operands
from tests.backends.without_gpu import printed_by
from tests.zoo.build import build

SIZES = [(4, 2), (8, 2), (16, 4), (32, 4), (64, 6), (128, 8), (256, 8)]


class Kernel:
    """What a launch needs of one."""

    __name__ = "a_kernel"
    params = ()

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.launched.append((grid, arguments, constants))


@pytest.mark.slow
def test_every_batch_finds_its_kernels_compiled() -> None:
    (told,) = printed_by("tests.backends.experts.compile_ahead")
    assert len(told["ahead"]) == 15 and told["ahead"].count("product_hopper") == 2 and told["later"] == told["failed"] == []
    assert told["early"] == ["few_first", "few_second", "grouped_first", "sort_few_pairs", "sum_parts"]
    assert told["hasty"] == []


def test_a_launch_waits_for_its_own_variant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, future = Kernel(), Future[None]()
    monkeypatch.setattr(compile_ahead, "_under_way", {kernel: {(kernel, (), (("N", 3),)): future}})
    compile_ahead.launch(kernel, (2,), 1, N=2)
    assert kernel.launched.pop() == ((2,), (1,), {"N": 2})
    thread = threading.Thread(target=compile_ahead.launch, args=(kernel, (2,), 1), kwargs={"N": 3})
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not kernel.launched
    future.set_result(None)
    thread.join(10)
    assert kernel.launched == [((2,), (1,), {"N": 3})]


def test_what_could_not_be_compiled_ahead_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    kernel, future = Kernel(), Future[None]()
    future.set_exception(RuntimeError("no assembler"))
    monkeypatch.setattr(compile_ahead, "_under_way", {kernel: {(kernel, (), ()): future}})
    with caplog.at_level(logging.WARNING, "paged_attn"):
        compile_ahead.launch(kernel, (1,))
    assert "a_kernel could not be compiled ahead, and is compiled now: no assembler" in caplog.text and len(kernel.launched) == 1


def test_nothing_is_launched_while_compiling() -> None:
    kernel = Kernel()
    with compile_ahead.compiling_ahead(torch.device("cpu")):
        compile_ahead.launch(kernel, (1,), torch.empty(2))
    assert not kernel.launched


@pytest.mark.parametrize("writes", [True, False])
def test_a_launcher_is_asked_for_where_triton_has_it_built_in_c(writes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Elsewhere there is none, and each job failed over it."""
    jobs: list[Any] = []
    monkeypatch.setattr(compile_ahead, "driver", SimpleNamespace(active=CompilingDriver("a GPU")))
    monkeypatch.setattr(compile_ahead, "note_of", lambda *_: tmp_path / "none")
    monkeypatch.setattr(compile_ahead, "_asked", {})
    monkeypatch.setattr(compile_ahead, "_under_way", {})
    monkeypatch.setattr(compile_ahead, "writes_launchers", lambda: writes)
    compile_ahead._compile(Kernel(), (1,), (), {}, torch.device("cuda"), jobs, True)
    ((job, _),) = jobs
    assert pickle.loads(job).launcher == writes


@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_counts_of_tokens_meet_every_kernel(experts: int, top_k: int) -> None:
    def kind(tokens: int) -> tuple[Any, ...]:
        return tiling_for(tokens * top_k / experts, w1, True), tokens * top_k <= ONE_PROGRAM

    w1 = torch.empty(experts, 2, 1, dtype=torch.bfloat16)
    counts = [*token_counts(w1, top_k, True)]
    assert {kind(tokens) for tokens in counts} >= {kind(tokens) for tokens in range(1, 20_000, 8)}


def test_a_graph_asks_once_for_equal_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(OneByOneBackend, "compile_ahead", lambda self, *given: asked.append(given))
    graph = torch.fx.Graph()
    for gating, top_k in ((Gating(), 2), (Gating(), 2), (Gating("gelu"), 2), (Gating(), 3)):
        given, nodes = operands(5, gating, top_k=top_k)[:7], []
        for value in given:
            nodes.append(None if value is None else graph.placeholder("given"))
            if value is not None:
                nodes[-1].meta["example_value"] = value
        graph.call_function(EXPERTS, (*nodes, *gating.arguments, ONE_BY_ONE))
    compile_graph_ahead(graph)
    assert [(given[1].shape[1], given[7]) for given in asked] == [(2, Gating()), (2, Gating("gelu")), (3, Gating())]


def test_a_module_asks_before_it_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(OneByOneBackend, "compile_ahead", lambda self, *given: asked.append(given))
    model = build("qwen3_moe")
    with experts_as_ops(model, ONE_BY_ONE) as count:
        assert count > 1
    x, ids, weights, w1, *_ = asked[0]
    assert len(asked) == 1 and ids.shape[1] == weights.shape[1] == model.config.num_experts_per_tok
    assert x.shape[1] == w1.shape[2] and ids.dtype == torch.int64
