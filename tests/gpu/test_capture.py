"""CUDA graphs on a GPU: the model's own tokens through full graphs and pieces, failures, threads, memory, and no waiting."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paged_attn import LLM, SamplingParams, explain
from paged_attn.attn_ops.batch.batch import BatchRequest
from paged_attn.attn_ops.errors import CaptureError
from paged_attn.engine.engine import Engine
from tests.gpu.test_no_sync import waiting_is_an_error
from tests.oracle import greedy, random_prompts
from tests.tiny_models import build

if torch.cuda.is_available():
    from paged_attn.capture.graphs.recorder import CudaRecorder
    from paged_attn.capture.graphs.segments import record

pytestmark = pytest.mark.usefixtures("full_float32")
PROMPTS = random_prompts((1, 5, 17, 33, 70, 2, 9))
GREEDY = SamplingParams(max_new_tokens=16)
SETTINGS: dict[str, Any] = {
    "max_batch_tokens": 24, "max_requests": 5, "num_pages": 96, "graph_decode_sizes": 3, "graph_extend_sizes": 2, "graph_strict": True,
}  # fmt: skip


def recorder() -> Any:
    return CudaRecorder(torch.device("cuda", torch.cuda.current_device()))


class TestRecorder:
    def test_a_replay_reads_and_writes_the_same_addresses(self) -> None:
        x = torch.ones(4, device="cuda")
        (x * 2).sum()
        segments = record(lambda: F.relu(x * 2 - 3), recorder(), lambda op: False, [x])
        assert (segments.num_graphs, segments.num_calls) == (1, 0)
        for value in (1.0, 2.0, 5.0):
            x.fill_(value)
            segments.replay()
            assert segments.output.tolist() == [max(value * 2 - 3, 0.0)] * 4

    def test_an_op_stays_between_the_graphs(self) -> None:
        x = torch.ones(4, device="cuda")

        def run() -> torch.Tensor:
            return torch.cumsum(x + 1, 0) * 3

        segments = record(run, recorder(), lambda op: op is torch.ops.aten.cumsum.default, [x])
        assert (segments.num_graphs, segments.num_calls) == (2, 1)
        x.fill_(2)
        segments.replay()
        assert segments.output.tolist() == [9.0, 18.0, 27.0, 36.0]

    def test_after_a_failed_capture_the_device_works(self) -> None:
        x, made = torch.ones(4, device="cuda"), recorder()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="captur"):
                record(lambda: float((x * 2).sum()), made, lambda op: False, [x])
            assert torch.rand(3, device="cuda").isfinite().all()  # the random generator is in no capture
            assert torch.zeros(1 << 20, device="cuda").sum().item() == 0
            segments = record(lambda: x + 1, made, lambda op: False, [x])
            segments.replay()
            assert segments.output.tolist() == [2.0] * 4
        mark = made.mark()
        made.rollback(0)
        assert mark == 2

    def test_one_thread_captures_while_another_replays(self) -> None:
        x, y, mine = torch.ones(1 << 16, device="cuda"), torch.ones(1 << 16, device="cuda"), recorder()
        (x + 1).mul(2)
        replayed = record(lambda: (x + 1) * 2, mine, lambda op: False, [x])
        wrong: list[Any] = []
        stop = threading.Event()

        def replay() -> None:
            stream, count = torch.cuda.Stream(), 0
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    count += 1
                    x.fill_(count)
                    replayed.replay()
                    if float(replayed.output[-1]) != 2 * (count + 1):
                        wrong.append(count)

        thread = threading.Thread(target=replay)
        thread.start()
        try:
            other = recorder()
            for _ in range(50):
                segments = record(lambda: torch.relu(y * 3) + torch.empty(1 << 16, device="cuda").zero_(), other, lambda op: False, [y])
                segments.replay()
                assert float(segments.output[0]) == 3
        finally:
            stop.set()
            thread.join()
        assert not wrong


@pytest.mark.parametrize("compiled", [True, False], ids=["pieces", "eager breaks"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral", "gpt2"])
def test_tokens_are_the_models_own(name: str, compiled: bool) -> None:
    """More requests than the largest graph holds, chunks, shared prefixes, poisoned pages, every replay compared."""
    model = build(name).cuda()
    expected = [greedy(model, p, 16) for p in PROMPTS]
    with LLM(model, compile=compiled, inductor=compiled and name == "llama", graph_verify=True, **SETTINGS) as llm:
        llm.engine.pool.storage[1:].fill_(float("nan"))
        for _ in ("cold", "warm"):
            assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected
        text = explain(llm)
        assert f"full graphs of {1 if compiled else 2} to 5" in text and "captured pieces of 16 to 24" in text and "no graph" not in text


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_lengths_pages_and_counts_change_between_replays(mode: str) -> None:
    model = build("llama").cuda()
    expected = {n: [greedy(model, p, 16) for p in PROMPTS[:n]] for n in (1, 2, 3, 5)}
    with LLM(model, inductor=False, graphs=mode, prefix_cache=False, **SETTINGS) as llm:
        for n in (5, 1, 3, 2, 5, 1):
            llm.engine.pool.storage[1:].fill_(float("nan"))
            assert [c.token_ids for c in llm.generate(PROMPTS[:n], GREEDY)] == expected[n]


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_a_captured_decode_step_does_not_wait(mode: str) -> None:
    model = build("llama").cuda()
    with LLM(model, inductor=False, graphs=mode, **SETTINGS) as llm:
        steps = llm.engine.step_runner
        requests = [BatchRequest([3], [1, 2], 17), BatchRequest([4], [3], 5), BatchRequest([4], [4], 1)]
        steps.run(steps.prepare(requests))
        with waiting_is_an_error():
            step = steps.prepare(requests)
            assert step.captured is not None and step.captured.key.mode == mode
            steps.run(step)
        torch.cuda.synchronize()


def test_close_frees_the_graphs() -> None:
    model = build("llama").cuda()
    engine = Engine(model, config=LLM(model, inductor=False, graphs="off", num_pages=8).engine.config.with_(graphs="full", **SETTINGS))
    assert engine.step_runner.graphs is not None and engine.step_runner.report().nbytes > 0
    made = engine.step_runner.graphs.recorder
    engine.close()
    assert isinstance(made, CudaRecorder) and made.mark() == 0
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o).__name__ == "CUDAGraph"]


@pytest.mark.parametrize("graphs", ["off", "full"])
def test_the_next_engine_gets_the_memory_of_one_that_was_closed_in_the_middle_of_work(graphs: str) -> None:
    """Pools of all free memory, one after the other, and the first object is still held."""
    model = build("llama").cuda()
    expected, pages, held = [greedy(model, prompt, 16) for prompt in PROMPTS], list[int](), list[LLM]()
    for _ in range(2):
        with LLM(model, inductor=False, graphs=graphs, **{**SETTINGS, "num_pages": None}) as llm:
            assert [done.token_ids for done in llm.generate(PROMPTS, GREEDY)] == expected
            pages.append(llm.engine.pool.num_pages)
            next(llm.stream(PROMPTS, GREEDY))
        held.append(llm)
    assert pages[1] >= 0.98 * pages[0]


class Waits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.ops.paged_attn_test.waits(self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits)


def test_an_op_that_waits_runs_between_the_graphs() -> None:
    library = torch.library.Library("paged_attn_test", "FRAGMENT")
    library.define("waits(Tensor x) -> Tensor")
    library.impl("waits", lambda x: x * (1 if float(x.sum()) == float(x.sum()) else 2), "CUDA")
    torch.library.register_fake("paged_attn_test::waits", torch.empty_like, lib=library)
    model = build("llama").cuda()
    expected = [greedy(model, p, 16) for p in PROMPTS]
    with LLM(Waits(model), inductor=False, **SETTINGS) as llm:
        text = explain(llm)
        assert "between      paged_attn_test.waits.default" in text and "no graph" not in text
        assert "1 ops between" in text, "the full graphs are parted at it, too"
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected


def test_a_model_that_waits_is_left_uncaptured_with_its_reason() -> None:
    model = build("llama").cuda()
    expected = [greedy(model, p, 16) for p in PROMPTS]
    norm = model.model.norm
    forward = norm.forward
    norm.forward = lambda x: forward(x) * (1 if float(x.sum()) < float("inf") else 2)  # what Python makes of it would be baked in
    with LLM(model, compile=False, **{**SETTINGS, "graph_strict": False}) as llm:
        text = explain(llm)
        assert "no graph     piecewise 24" in text and "_local_scalar_dense" in text
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == expected
    with pytest.raises(CaptureError, match="piecewise 24 cannot be captured"):
        LLM(model, compile=False, **SETTINGS)
    assert torch.rand(3, device="cuda").isfinite().all()


def test_sampling_in_the_graph() -> None:
    model = build("llama").cuda()
    with LLM(model, inductor=False, **SETTINGS) as llm:
        steps = llm.engine.step_runner
        llm.engine.pool.storage.zero_()
        step = steps.prepare([BatchRequest([5], [1, 2], 17), BatchRequest([7], [3], 2)])
        assert step.captured is not None and step.captured.key.mode == "full"
        logits, best = steps.run(step)
        assert best is not None and torch.equal(best, logits.argmax(-1))
        assert best.data_ptr() == step.captured.segments.output[1].data_ptr()
