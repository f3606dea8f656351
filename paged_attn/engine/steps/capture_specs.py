"""Which shapes of a model's steps are captured, and how each is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest, RequestColumns
from paged_attn.attn_ops.batch.step_buffers import MIN_ROWS, StepBuffers, StepShape
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.kinds import KINDS
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.capabilities import GraphSupport
from paged_attn.capture.graphs.buckets import bucket_sizes, coarse_to_fine
from paged_attn.capture.graphs.graph_set import CaptureSpec, GraphKey
from paged_attn.capture.split.split_ops import is_split_op, split_ops
from paged_attn.engine.lora.lora_runner import LoraSlots
from paged_attn.engine.runners.runner import Runner
from paged_attn.engine.steps.future_tokens import FutureTokens, GreedyInGraph, forward
from paged_attn.engine.steps.one_row_check import OneRowCheck
from paged_attn.recurrent.run import RecurrentRunner

INSIDE_FULL_GRAPHS = frozenset(kind.op for kind in KINDS if kind.in_full_graphs)
SMALLEST_EXTEND = 16


@dataclass(frozen=True)
class CaptureSettings:
    """Attributes:
    full: capture decode steps whole, attention included.
    max_requests, max_rows: the largest decode step and the most rows of any step.
    decode_sizes, extend_sizes: how many sizes of each to capture.
    budget_bytes: device memory for all graphs.
    strict: a shape that cannot be captured is an error.
    verify: compare every replay with the model uncaptured.
    one_row: a step of one request is captured as one row, and not padded to two.
    """

    full: bool
    max_requests: int
    max_rows: int
    decode_sizes: int
    extend_sizes: int
    budget_bytes: int
    strict: bool = False
    verify: bool = False
    one_row: bool = False

    def decode_order(self) -> list[int]:
        """Sizes of full graphs in the order of their capture."""
        return coarse_to_fine(bucket_sizes(self.max_requests, self.decode_sizes, 1 if self.one_row else MIN_ROWS))

    def extend_order(self) -> list[int]:
        """Rows of captured pieces in the order of their capture."""
        return coarse_to_fine(bucket_sizes(self.max_rows, self.extend_sizes, min(SMALLEST_EXTEND, max(self.max_rows, MIN_ROWS))))


@dataclass(frozen=True)
class FullState:
    """What a replay of a full graph needs: the backend and plan of its capture, and the batch whose tensors the plan uses."""

    backend: AttentionBackend
    plan: Any
    batch: Batch


def full_shape(size: int) -> StepShape:
    """The shape of a full graph: one row and one row of logits for each request, dummies included."""
    return StepShape(size, size, size)


def extend_shape(size: int, settings: CaptureSettings) -> StepShape:
    """The shape of captured pieces: as many rows of logits as rows, at most one for each request."""
    return StepShape(size, max(MIN_ROWS, min(size, settings.max_requests)))


@dataclass(frozen=True)
class CaptureSpecs:
    """`pieces` and `full` prepare a shape for `GraphSet.capture`."""

    runner: Runner
    settings: CaptureSettings
    pool: KVPool
    backend: AttentionBackend
    buffers: StepBuffers
    recurrent: RecurrentRunner | None
    greedy_in_graph: GreedyInGraph | None
    future_tokens: FutureTokens
    one_row: OneRowCheck
    lora_slots: LoraSlots | None = None

    @property
    def why_not_full(self) -> str:
        """Why decode steps are not captured whole, or ""."""
        if not self.settings.full:
            return "not asked for"
        if self.backend.graph_support() is GraphSupport.NEVER:
            return f"{self.backend.name}{' in deterministic mode' * self.backend.deterministic} cannot be captured"
        between = [layer for layer in self.runner.recurrent if not layer.in_graphs]
        if between:
            first = between[0]
            return f"recurrent layers run by their own forward between the graphs: {first.spec.module}: {first.why_not_in_graphs}"
        if not all(layer.by_backend for layer in self.runner.layers):
            return "attention that is recomputed runs between the graphs"
        return ""

    def full_keys(self) -> list[GraphKey]:
        """Shapes of whole decode steps in the order of their capture; none if they cannot be captured."""
        if self.why_not_full:
            return []
        return [
            GraphKey("full", size, variant)
            for size in self.settings.decode_order()
            for variant in range(len(self.backend.graph_lengths(size, self._max_context, self.pool)))
        ]

    @contextmanager
    def pieces(self, key: GraphKey) -> Iterator[CaptureSpec]:
        """For any step of `key.size` rows: attention runs between the graphs. Recorded on dummy prompts."""
        size, ops = key.size, split_ops()
        shape = extend_shape(size, self.settings)
        columns = RequestColumns.of(self._prompts(size))
        columns.group_tables = np.stack([columns.page_table] * self.buffers.num_groups)[1:]
        batch = self._with_slots(Batch.build(columns, self.pool.page_size, self.runner.device, shape, self.buffers))
        with ForwardContext(batch, self.pool, self.backend, self.recurrent):
            yield CaptureSpec(
                lambda: forward(self.runner, batch, self.greedy_in_graph, self.future_tokens),
                lambda op: is_split_op(op, ops),
                self._kept(batch),
            )

    @contextmanager
    def full(self, key: GraphKey) -> Iterator[CaptureSpec]:
        """For a decode step of `key.size` requests, attention included. Recorded on dummy requests."""
        size, device = key.size, self.runner.device
        if size == 1:
            self.one_row.check(self.pool, self.backend)
        batch = self._with_slots(Batch.build([], self.pool.page_size, device, full_shape(size), self.buffers))
        length = self.backend.graph_lengths(size, self._max_context, self.pool)[key.variant]
        backend = self.backend.for_graph(size, size * self.buffers.max_pages)
        planned = replace(batch, seq_lens_host=(length,) * size)
        plan, ops = backend.plan(planned, self.pool), split_ops() - INSIDE_FULL_GRAPHS

        def run() -> Any:
            backend.plan_groups_in_graph([plan], model_follows=True)
            return forward(self.runner, batch, self.greedy_in_graph, self.future_tokens)

        with ForwardContext(batch, self.pool, backend, self.recurrent, plan):
            yield CaptureSpec(run, lambda op: is_split_op(op, ops), self._kept(batch), FullState(backend, plan, batch))

    def _with_slots(self, batch: Batch) -> Batch:
        return batch if self.lora_slots is None else self.lora_slots.given(batch, None)

    def _kept(self, batch: Batch) -> list[Tensor]:
        return [
            *self.runner.owned.values(),
            batch.input_ids,
            batch.positions,
            batch.slots,
            *(group.slots for group in batch.groups[1:]),
            batch.logits_rows,
            batch.state_slots,
            *(self.recurrent.pool.tensors if self.recurrent is not None else ()),
            self.pool.storage,
            self.future_tokens.tokens,
            *(slots for slots in (batch.lora_slots, batch.lora_logits_slots) if slots is not None),
        ]

    def _prompts(self, tokens: int) -> list[BatchRequest]:
        """Prompts with this many tokens in total, none longer than the model's positions, all on page 1."""
        longest = min(self._max_context, tokens)
        requests: list[BatchRequest] = []
        while tokens:
            count = min(longest, tokens)
            slot = len(requests) + 1 if self.recurrent is not None else 0  # no request will start from what they leave there
            requests.append(BatchRequest([0] * count, [1] * -(-count // self.pool.page_size), state_slot=slot))
            tokens -= count
        return requests

    @property
    def _max_context(self) -> int:
        room = self.buffers.max_pages * self.pool.page_size
        return room if self.runner.max_positions is None else min(room, self.runner.max_positions)
