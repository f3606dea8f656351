"""Runs the engine's steps: through captured graphs where one fits, otherwise uncaptured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, RequestColumns
from paged_attn.attn_ops.batch.step_buffers import MIN_ROWS, StepBuffers
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import CaptureError, UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.capture.graphs.buckets import BucketSizes
from paged_attn.capture.graphs.graph_set import MIB, Captured, GraphKey, GraphSet, Prepare
from paged_attn.capture.graphs.pointer_check import PointerCheck
from paged_attn.capture.graphs.recorder import Recorder
from paged_attn.engine.lora.lora_slots import LoraSlots
from paged_attn.engine.runners.runner import Runner
from paged_attn.engine.steps.capture_report import CaptureReport
from paged_attn.engine.steps.capture_specs import CaptureSettings, CaptureSpecs, extend_shape, full_shape
from paged_attn.engine.steps.future_tokens import FutureTokens, Output, SampleInGraph, forward
from paged_attn.engine.steps.one_row_check import OneRowCheck
from paged_attn.progress import bar
from paged_attn.recurrent.run import RecurrentRunner
from paged_attn.tolerances import logits_apart


@dataclass(frozen=True)
class Step:
    """A batch, and the graphs that run it; None: it runs uncaptured. `num_logits` are wanted."""

    batch: Batch
    captured: Captured | None
    num_logits: int


class StepOutput(NamedTuple):
    """logits [num_logits, vocabulary], and the tokens [num_logits] that were sampled in the graph; the next step of the same runner
    overwrites both."""

    logits: Tensor
    greedy_tokens: Tensor | None


class StepRunner:
    """Steps of one model, of one thread at a time.

    Args:
        recorder: makes the graphs; None captures nothing.
        page_size, max_pages, num_groups: of the pool, of one request, and of layers with page tables of their own.
        future_tokens: those of another runner of the same engine; None makes some.
        one_row: the check of another runner of the same model; None makes one.
        lora_slots: where the slots of a step's adapters lie, if `runner` is one with adapters.
        sample_in_graph: chooses a token for each row of logits, also in captured steps; they go to `future_tokens`. None: nobody does.

    Attributes:
        future_tokens: the tokens of the last step, for whoever launches the next before knowing them (`future_token`). Who chooses
            otherwise puts those tokens there.

    Raises:
        UnsupportedError: `settings.verify` for a model with recurrent state.

    Captured steps read their inputs from `buffers`; logits of a captured step are overwritten by the next one.
    """

    pool: KVPool  # set by the last `use`, which comes before any step or capture
    backend: AttentionBackend

    def __init__(
        self,
        runner: Runner,
        settings: CaptureSettings,
        recorder: Recorder | None,
        page_size: int,
        max_pages: int,
        recurrent: RecurrentRunner | None = None,
        sample_in_graph: SampleInGraph | None = None,
        future_tokens: FutureTokens | None = None,
        one_row: OneRowCheck | None = None,
        lora_slots: LoraSlots | None = None,
        num_groups: int = 1,
    ) -> None:
        if settings.verify and recurrent is not None:
            raise UnsupportedError(
                f"graph_verify runs every step twice, and {type(runner.model).__name__} has recurrent state, which would advance twice; "
                "leave graph_verify off"
            )
        self.runner, self.settings, self.recurrent, self.sample_in_graph = runner, settings, recurrent, sample_in_graph
        self.page_size = page_size
        self.future_tokens = future_tokens or FutureTokens(max(settings.max_requests, MIN_ROWS), runner.device)
        self.one_row, self.lora_slots = one_row or OneRowCheck(runner), lora_slots
        self.graphs: GraphSet | None = None
        self.buffers: StepBuffers | None = None
        self._pointer_check: PointerCheck | None = None
        self._pieces, self._full = BucketSizes(), BucketSizes()
        self.why_not_full = ""
        if recorder is not None:
            self.graphs = GraphSet(recorder, settings.budget_bytes, settings.strict, agree=runner.ranks.all_say if runner.ranks else bool)
            most = max(settings.max_requests, MIN_ROWS)
            self.buffers = StepBuffers(max(settings.max_rows, most), most, most, max_pages, runner.device, num_groups)
            read = [buffer for layer in runner.recurrent if not layer.ops for buffer in layer.module.buffers()]
            self._pointer_check = PointerCheck(runner.model, [*runner.owned.values(), *read])

    def use(self, pool: KVPool, backend: AttentionBackend) -> None:
        """Steps read and write this pool from now on. Full graphs hold its addresses: capture them afterwards."""
        self.pool, self.backend = pool, backend

    def capture_pieces(self) -> None:
        """Record the graphs between the split ops, which know no pool: any pool of the same layers will do."""
        keys = [GraphKey("piecewise", size) for size in self.settings.extend_order()]
        self._pieces = self._captured(keys, self._capture_specs().pieces, "piecewise")

    def full_bytes(self) -> int:
        """What all full graphs will take, at most what they may: measured on the largest and the smallest with the pool at hand, which are
        not kept. The budget is no bound for these two: the first to be recorded also pays for workspaces, which stay."""
        specs = self._capture_specs()
        keys = specs.full_keys()
        if self.graphs is None or not keys:
            return 0
        graphs = self.graphs
        trial = GraphSet(graphs.recorder, sys.maxsize, self.settings.strict, unsafe=graphs.unsafe, agree=graphs.agree)
        mark = trial.recorder.mark()
        for _ in trial.capture([keys[0], *keys[1:][-1:]], specs.full):
            pass
        sizes = [captured.nbytes for captured in trial.captured.values()]
        trial.recorder.rollback(mark)
        wanted = sizes[0] + sizes[-1] * (len(keys) - 1) if sizes else 0
        return min(wanted, max(graphs.budget - graphs.nbytes, 0))

    def capture_full(self) -> None:
        """Record whole decode steps on the pool in use."""
        specs = self._capture_specs()
        self.why_not_full = specs.why_not_full
        if keys := specs.full_keys():
            self._full = self._captured(keys, specs.full, "decode steps")

    def _captured(self, keys: list[GraphKey], prepare: Prepare, what: str) -> BucketSizes:
        """Sizes that were recorded, of these shapes; a bar shows where the capture is."""
        assert self.graphs is not None
        what = f"capturing {what}" if self.lora_slots is None else f"capturing {what}, with adapters"
        with bar(self.graphs.capture(keys, prepare), total=len(keys), what=what, unit="shape") as shown:
            for key in shown:
                shown.set_postfix_str(f"{key}, {self.graphs.nbytes / MIB:,.0f} MiB")
        return BucketSizes(self.graphs.sizes(keys[0].mode))

    def prepare(self, requests: Sequence[BatchRequest] | RequestColumns) -> Step:
        """Lay the requests out for the smallest captured shape that holds them, or as they are."""
        columns = RequestColumns.of(requests)
        agree = self.runner.ranks.compare_step(columns) if self.runner.ranks is not None else None
        num_logits = int(columns.num_logits.sum())
        step = self._prepared(columns, num_logits) if self.graphs is not None and self.graphs.captured else None
        step = step or Step(Batch.build(columns, self.page_size, self.runner.device), None, num_logits)
        if self.lora_slots is not None:
            step = replace(step, batch=self.lora_slots.given(step.batch, columns))
        if agree is not None:
            agree()
        return step

    def _prepared(self, requests: RequestColumns, num_logits: int) -> Step | None:
        """The step for a captured shape, or None if none holds it."""
        assert self.graphs is not None
        device = self.runner.device
        size = self._full.fit(len(requests))
        if size is not None and requests.all_decode:
            batch = Batch.build(requests, self.page_size, device, full_shape(size), self.buffers)
            key = GraphKey("full", size, self.backend.graph_variant(batch, self.pool))
            if key in self.graphs.captured:
                return Step(batch, self.graphs.captured[key], num_logits)
        size = self._pieces.fit(len(requests.tokens))
        if size is None or num_logits > (shape := extend_shape(size, self.settings)).logits:
            return None
        batch = Batch.build(requests, self.page_size, device, shape, self.buffers)
        return Step(batch, self.graphs.captured[GraphKey("piecewise", size)], num_logits)

    def run(self, step: Step) -> StepOutput:
        """Logits [num_logits, vocabulary], and the tokens that `sample_in_graph` chooses.

        Raises:
            CaptureError: a tensor of the model moved; or, with `verify`, a replay gave other logits than the model uncaptured.
        """
        if step.captured is None:
            output = self._uncaptured(step.batch)
        else:
            assert self._pointer_check is not None
            self._pointer_check.check()
            output = self._replay(step.batch, step.captured)
            if self.settings.verify and step.num_logits:
                self._verify(step, output[0])
        logits, tokens = output
        return StepOutput(logits[: step.num_logits], None if tokens is None else tokens[: step.num_logits])

    def report(self) -> CaptureReport:
        """Which mode serves which steps, and what that cost."""
        return CaptureReport.of(self.graphs, self.settings, self.runner.runs_as, self.why_not_full)

    def close(self) -> None:
        """Free all graphs; later steps run uncaptured."""
        if self.graphs is not None:
            self._pieces, self._full = BucketSizes(), BucketSizes()
            self.graphs.clear()

    def _capture_specs(self) -> CaptureSpecs:
        assert self.buffers is not None
        return CaptureSpecs(
            self.runner, self.settings, self.pool, self.backend, self.buffers, self.recurrent, self.sample_in_graph, self.future_tokens,
            self.one_row, self.lora_slots,
        )  # fmt: skip

    def _replay(self, batch: Batch, captured: Captured) -> Output:
        segments, backend, plan = captured.segments, self.backend, None
        if captured.key.mode == "full":
            backend, plan = captured.state.backend, captured.state.plan
            backend.refresh(plan, batch)
            if not segments.num_calls:
                segments.replay()
                output: Output = segments.output
                return output
        with ForwardContext(batch, self.pool, backend, self.recurrent, plan):
            segments.replay()
        output = segments.output
        return output

    def _uncaptured(self, batch: Batch) -> Output:
        with ForwardContext(batch, self.pool, self.backend, self.recurrent):
            return forward(self.runner, batch, self.sample_in_graph, self.future_tokens)

    def _verify(self, step: Step, logits: Tensor) -> None:
        """KV is written twice, with the same numbers."""
        assert step.captured is not None
        replayed = logits[: step.num_logits].clone()
        expected = self._uncaptured(step.batch)[0][: step.num_logits]
        error, limit = logits_apart(expected, replayed, self.runner.dtype)
        if not error <= limit:
            raise CaptureError(
                f"verify: the graph {step.captured.key} gave logits that are off by {error:.2g} of their size (allowed {limit:g}) for a "
                f"step of {step.batch.num_tokens} tokens; something in the model changed since the capture, or cannot be captured. "
                "Set graphs='off' and please report it."
            )
