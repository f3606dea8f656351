"""Runs the engine's steps: through captured graphs where one fits, otherwise uncaptured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, ForwardMode, RequestColumns
from paged_attn.attn_ops.batch.step_buffers import MIN_ROWS, StepBuffers
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import CaptureError, UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.capture.graphs.buckets import BucketSizes
from paged_attn.capture.graphs.graph_set import MIB, Captured, GraphKey, GraphSet, Prepare
from paged_attn.capture.graphs.pointer_check import PointerCheck
from paged_attn.capture.graphs.recorder import Recorder
from paged_attn.engine.lora.lora_runner import LoraSlots
from paged_attn.engine.runners.runner import Runner
from paged_attn.engine.steps.capture_report import CaptureReport
from paged_attn.engine.steps.capture_specs import CaptureSettings, CaptureSpecs, extend_shape, full_shape
from paged_attn.engine.steps.future_tokens import FutureTokens, GreedyInGraph, Output, forward
from paged_attn.engine.steps.one_row_check import OneRowCheck
from paged_attn.progress import bar
from paged_attn.recurrent.run import RecurrentRunner
from paged_attn.tolerances import logits_apart


@dataclass(frozen=True)
class Step:
    """A batch, the graphs that run it (None: it runs uncaptured), and how many rows of logits are wanted."""

    batch: Batch
    captured: Captured | None
    num_logits: int


class StepOutput(NamedTuple):
    """logits [num_logits, vocabulary], and the greedy tokens [num_logits] if they were computed with the logits; the next step of the same
    runner overwrites both."""

    logits: Tensor
    greedy_tokens: Tensor | None


class StepRunner:
    """Runs steps of one model, in one thread at a time.

    Args:
        recorder: records the graphs; None captures nothing.
        page_size, max_pages, num_groups: of the pool; of one request; groups of layers with their own page tables.
        future_tokens: shared with another runner of the same engine; None creates them.
        one_row: the check of another runner of the same model; None creates one.
        lora_slots: the device memory of each row's adapter slot, if `runner` has adapters.
        greedy_in_graph: chooses the most likely token of each row of logits, inside captured steps too, and stores it in `future_tokens`;
            None leaves that to the sampler.

    Attributes:
        future_tokens: the tokens of the last step, so that the next can be launched before the host knows them (`future_token`). The
            sampler overwrites them with the tokens that it chooses.

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
        greedy_in_graph: GreedyInGraph | None = None,
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
        self.runner, self.settings, self.recurrent, self.greedy_in_graph = runner, settings, recurrent, greedy_in_graph
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
            fetch = self.future_tokens.fetch()
            self.buffers = StepBuffers(max(settings.max_rows, most), most, most, max_pages, runner.device, num_groups, fetch)
            read = [buffer for layer in runner.recurrent if not layer.ops for buffer in layer.module.buffers()]
            self._pointer_check = PointerCheck(runner.model, [*runner.owned.values(), *read])

    def use(self, pool: KVPool, backend: AttentionBackend) -> None:
        """Read and write this pool in all later steps. Full graphs hold its addresses, so capture them afterwards."""
        self.pool, self.backend = pool, backend

    def capture_pieces(self) -> None:
        """Record the graphs between the split ops. They do not depend on the pool: any pool of the same layers will do."""
        keys = [GraphKey("piecewise", size) for size in self.settings.extend_order()]
        self._pieces = self._capture(keys, self._capture_specs().pieces, "piecewise")

    def measure_full_graph_bytes(self) -> int:
        """Estimate the memory of all full graphs, at most their budget, from the largest and the smallest, which are recorded with the
        current pool and dropped. These two may exceed the budget: the first recording also allocates workspaces, which stay."""
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
            self._full = self._capture(keys, specs.full, "decode steps")

    def _capture(self, keys: list[GraphKey], prepare: Prepare, what: str) -> BucketSizes:
        """Record these shapes, with a progress bar; returns the sizes that could be recorded."""
        assert self.graphs is not None
        what = f"capturing {what}" if self.lora_slots is None else f"capturing {what}, with adapters"
        with bar(self.graphs.capture(keys, prepare), total=len(keys), what=what, unit="shape") as shown:
            for key in shown:
                shown.set_postfix_str(f"{key}, {self.graphs.nbytes / MIB:,.0f} MiB")
        return BucketSizes(self.graphs.sizes(keys[0].mode))

    def prepare(self, requests: Sequence[BatchRequest] | RequestColumns) -> Step:
        """Build the batch, padded to the smallest captured shape that holds it, or unpadded if none does."""
        columns = RequestColumns.of(requests)
        settle = self.runner.ranks.compare_step(columns) if self.runner.ranks is not None else None
        num_logits = int(columns.num_logits.sum())
        step = self._step_in_graph(columns, num_logits) if self.graphs is not None and self.graphs.captured else None
        step = step or Step(Batch.build(columns, self.page_size, self.runner.device), None, num_logits)
        if self.lora_slots is not None:
            step = replace(step, batch=self.lora_slots.given(step.batch, columns))
        if settle is not None:
            settle()
        return step

    def _step_in_graph(self, requests: RequestColumns, num_logits: int) -> Step | None:
        """The step padded to the smallest captured shape, in the buffers that graphs read; None if no shape holds it."""
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
        """Logits [num_logits, vocabulary], and greedy tokens with `greedy_in_graph`. Raises CaptureError: a tensor of the model moved; or,
        with `verify`, a replay gave other logits than the model uncaptured."""
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
        """Which steps are captured, in which mode, and what that cost."""
        return CaptureReport.of(self.graphs, self.settings, self.runner.runs_as, self.why_not_full)

    def close(self) -> None:
        """Free all graphs; later steps run uncaptured."""
        if self.graphs is not None:
            self._pieces, self._full = BucketSizes(), BucketSizes()
            self.graphs.clear()

    def _capture_specs(self) -> CaptureSpecs:
        assert self.buffers is not None
        return CaptureSpecs(
            self.runner, self.settings, self.pool, self.backend, self.buffers, self.recurrent, self.greedy_in_graph, self.future_tokens,
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
        late = plan is None and batch.mode is not ForwardMode.DECODE  # a decode step's is not launched right before: TritonBackend.forward
        with ForwardContext(batch, self.pool, backend, self.recurrent, plan, plans_late=late):
            segments.replay()
        output = segments.output
        return output

    def _uncaptured(self, batch: Batch) -> Output:
        with ForwardContext(batch, self.pool, self.backend, self.recurrent):
            return forward(self.runner, batch, self.greedy_in_graph, self.future_tokens)

    def _verify(self, step: Step, logits: Tensor) -> None:
        """Compare with the uncaptured model. KV is written twice, with the same numbers."""
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
