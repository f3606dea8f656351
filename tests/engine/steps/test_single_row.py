"""Steps of one request as one row: the unmodified model's tokens, and two rows where one row is not what more are."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from paged_attn import SamplingParams
from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import CaptureError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.linears.add_norm import ADD_NORM_LINEAR
from paged_attn.attn_ops.ops.linears.linear import LINEAR
from paged_attn.backends.selection.select import select_for_pool
from paged_attn.check.runs.traced_served import TracedServed
from paged_attn.compiled.options import CompileOptions
from paged_attn.engine.config import EngineConfig
from paged_attn.engine.engine import Engine
from paged_attn.engine.runners.traced_runner import TracedRunner
from paged_attn.engine.steps.one_row_check import check_one_row
from paged_attn.report.explanation import besides
from tests.capture.tape import TapeRecorder
from tests.engine.models import oracle, random_prompts, run_all, tiny
from tests.engine.steps.test_captured_steps import fixed_backend
from tests.tiny_models import build

PROMPT, OTHER = random_prompts(6, 5, 9)
SETTINGS: dict[str, Any] = {
    "page_size": 4, "num_pages": 64, "max_requests": 4, "max_batch_tokens": 24, "graph_decode_sizes": 4, "graph_extend_sizes": 2,
    "gemv": True,
}  # fmt: skip


def engine_of(model: PreTrainedModel | None = None, **settings: Any) -> Engine:
    with fixed_backend():
        return Engine(model or tiny(), config=EngineConfig(**{**SETTINGS, **settings}), recorder=TapeRecorder())


def sizes_of(engine: Engine) -> list[int]:
    """The size of the full graph that runs each step from now on, 0 for another."""
    sizes: list[int] = []
    run = engine.step_runner.run

    def spied(step: Any) -> Any:
        sizes.append(step.captured.key.size if step.captured and step.captured.key.mode == "full" else 0)
        return run(step)

    engine.step_runner.run = spied  # type: ignore[method-assign]
    return sizes


def tokens_of(engine: Engine, *prompts_and_counts: tuple[list[int], int]) -> list[list[int]]:
    requests = [engine.add_request(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True)) for prompt, count in prompts_and_counts]
    run_all(engine)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "gpt_neox", "mixtral", "deepseek_v3", "olmo2"])
def test_tokens_are_the_models_own_alone_and_when_the_others_have_ended(name: str) -> None:
    model = build(name, tie_word_embeddings=False)
    engine = engine_of(model, merge_linears=name != "gpt_neox")
    alone, longer, shorter = oracle(PROMPT, 8, model), oracle(OTHER, 8, model), oracle(PROMPT, 4, model)
    sizes = sizes_of(engine)
    assert tokens_of(engine, (PROMPT, 8)) == [alone]
    assert sizes == [0] + [1] * 7
    sizes.clear()
    assert tokens_of(engine, (OTHER, 8), (PROMPT, 4)) == [longer, shorter]
    assert set(sizes) == {0, 1, 2}
    engine.close()


def test_pages_of_one_token() -> None:
    engine = engine_of(page_size=1)
    sizes = sizes_of(engine)
    assert tokens_of(engine, (PROMPT, 8)) == [oracle(PROMPT, 8)]
    assert sizes == [0] + [1] * 7


def test_by_default_a_request_on_the_cpu_is_padded_to_two_rows() -> None:
    engine = engine_of(gemv=None)
    sizes = sizes_of(engine)
    assert tokens_of(engine, (PROMPT, 4)) == [oracle(PROMPT, 4)]
    assert set(sizes) == {0, 2}


def test_eager_breaks_know_no_single_rows() -> None:
    engine = engine_of(compile=False, gemv=None)
    sizes = sizes_of(engine)
    assert tokens_of(engine, (PROMPT, 4)) == [oracle(PROMPT, 4)]
    assert set(sizes) == {0, 2}


class Off:
    """Calls with one row go wrong."""

    def __init__(self, what: Any) -> None:
        self.what, self.run = what, TracedServed.run

    def __call__(self, served: TracedServed, batch: Batch, visit: Any) -> torch.Tensor:
        if batch.num_rows == 1:
            if isinstance(self.what, BaseException):
                raise self.what
            return self.run(served, batch, visit) + self.what
        return self.run(served, batch, visit)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (torch.arange(96.0), "one row alone gives logits that are off by"),
        (float("nan"), "one row alone gives logits that are off by inf"),
        (AssertionError("expected size 2==1"), "one row cannot be run: AssertionError: expected size 2==1"),
    ],
)
class TestWhereOneRowIsNotWhatMoreAre:
    def test_requests_are_padded_to_two_rows_and_the_report_says_why(self, what: Any, reason: str) -> None:
        off = Off(what)
        with mock.patch.object(TracedServed, "run", lambda *args: off(*args)):
            engine = engine_of()
            sizes = sizes_of(engine)
            assert tokens_of(engine, (PROMPT, 4)) == [oracle(PROMPT, 4)]
        assert set(sizes) == {0, 2}
        assert reason in "\n".join(engine.step_runner.report().lines())

    def test_strict_makes_it_an_error(self, what: Any, reason: str) -> None:
        off = Off(what)
        with mock.patch.object(TracedServed, "run", lambda *args: off(*args)), pytest.raises(CaptureError, match=reason):
            engine_of(graph_strict=True)


@pytest.mark.usefixtures("traced_anew")
def test_compiled_pieces_run_one_row() -> None:
    """Inductor compiled them for two rows and more."""
    options = CompileOptions(inductor=True, passes=("early_logits_gather", "merge_linears", "gemv"))
    runner = TracedRunner(build("llama", tie_word_embeddings=False), options)
    pool = KVPool(runner.layers, 2, 4, runner.dtype)
    backend = select_for_pool("torch_native", pool, runner.dtype).backend
    check_one_row(runner.served(), pool, backend)
    off = Off(1e-2 * torch.arange(96.0))
    with mock.patch.object(TracedServed, "run", lambda *args: off(*args)), pytest.raises(CaptureError, match="are off by"):
        check_one_row(runner.served(), pool, backend)


@pytest.mark.usefixtures("traced_anew")
def test_the_graph_calls_the_op_and_explain_says_so() -> None:
    found = engine_of().runner.compiled.rewrite  # type: ignore[attr-defined]
    calls = [node.target for node in found.gm.graph.nodes if node.target in (LINEAR, ADD_NORM_LINEAR)]
    assert len(calls) == found.counts["gemv"] == 22  # q, k, v, o, gate, up and down of three layers, and the head
    assert calls.count(ADD_NORM_LINEAR) == found.counts["add_norm"] == 6
    assert "22 linears have a kernel for single rows" in besides(found) and "6 norms are part of a product" in besides(found)


class Angles:
    """A graph with a table that is the transposed product of two matrices, and compiled code behind it that asks for its strides."""

    kv_dtype = torch.float32
    recurrent = ()

    def run(self, batch: Batch, visit: Any) -> torch.Tensor:
        table = torch.ones(1, 4, batch.num_rows).transpose(1, 2)
        taken = visit(mock.Mock(original="angles"), table)
        assert taken.stride() == table.stride(), "as compiled code says it"
        return torch.ones(batch.num_rows, 3)


def test_what_the_check_puts_between_pieces_has_the_strides_of_one_row() -> None:
    runner = TracedRunner(build("llama"), CompileOptions())
    pool = KVPool(runner.layers, 2, 4, runner.dtype)
    check_one_row(Angles(), pool, select_for_pool("torch_native", pool, runner.dtype).backend)  # type: ignore[arg-type]
