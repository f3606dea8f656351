"""Recurrent layers of a step: those that run by their own forward, and the states of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.attn_ops.ops.scans import Kernel, Kernels
from paged_attn.attn_ops.scans.state_rows import Extends, RecurrentPlan, StateRows, Wanted
from paged_attn.calling.plain_modes import evaluating
from paged_attn.recurrent.layer import RecurrentLayer


class RecurrentRunner:
    """The recurrent layers of one model and their pool; part of a forward context, beside the attention backend."""

    def __init__(self, layers: Sequence[RecurrentLayer], pool: StatePool) -> None:
        self.layers, self.pool = tuple(layers), pool
        self._wanted: Wanted = {}

    def plan(self, batch: Batch) -> RecurrentPlan:
        """Raises ContextError: a request or checkpoint has no slot, a slot that does not exist, or one that is used twice; or a checkpoint
        is not inside the request's new tokens."""
        slots = [*batch.state_slots_host[: batch.num_real_requests], *(kept.slot for each in batch.checkpoints.values() for kept in each)]
        if len(set(slots)) < len(slots) or not all(1 <= slot < self.pool.num_slots for slot in slots):
            raise ContextError(
                f"the batch's requests and checkpoints have state slots {slots}; allowed are 1 to {self.pool.num_slots - 1}, each once: "
                "take them from a SlotAllocator"
            )
        for index, checkpoints in batch.checkpoints.items():
            ends = [0, *(kept.tokens for kept in checkpoints), batch.query_lens_host[index]]
            if not all(end < after for end, after in pairwise(ends)):
                raise ContextError(
                    f"request {index} of the batch has {ends[-1]} new tokens and checkpoints after {ends[1:-1]} of them; allowed are "
                    "numbers from 1 on, ascending and less than all"
                )
        return RecurrentPlan(batch.num_tokens, (StateRows.of(batch, self._wanted),))

    def state(self, layer_id: int, state_id: int) -> Tensor:
        """[num_slots, ...]: the states that an op reads and writes."""
        return self.pool.states(layer_id)[state_id]

    def kernels(self, layer_id: int) -> Kernels:
        """The kernels that compute a layer's ops in place of the functions of `attn_ops/scans/`."""
        return self.layers[layer_id].kernels

    def forward(self, plan: RecurrentPlan, layer_id: int, inputs: Sequence[Tensor], output: Tensor) -> None:
        """Runs the layer's own forward: each extending request up to each of its checkpoints and to its end, then all decoding requests
        as one batch. Advances the states in the pool.

        inputs [1, T, ...] in the order of the layer's operands; output [1, T, ...].
        """
        layer, states = self.layers[layer_id], self.pool.states(layer_id)
        with evaluating(layer.module) if layer.module.training else nullcontext():
            for rows in plan.calls:
                if rows.extends is not None:
                    _extend(layer, states, rows.extends, inputs, output)
                _decode(layer, states, rows, inputs, output)
        output[:, plan.num_tokens :].zero_()


def _extend(layer: RecurrentLayer, states: Sequence[Tensor], extends: Extends, inputs: Sequence[Tensor], output: Tensor) -> None:
    owner, now = -1, None
    for start, length, of, target in zip(*(column.tolist() for column in extends.segments), strict=True):
        if of != owner:
            owner, slot = of, extends.slots[of]
            now = None if extends.fresh[of] else [state[slot : slot + 1].clone() for state in states]
        rows = slice(start, start + length)
        parts, now = layer.run_tokens([value[:, rows] for value in inputs], now)
        output[:, rows] = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        for state, after in zip(states, now, strict=True):
            state[target : target + 1] = after


def _decode(layer: RecurrentLayer, states: Sequence[Tensor], rows: StateRows, inputs: Sequence[Tensor], output: Tensor) -> None:
    """Runs only on the device if all requests decode and the layer takes them as one batch, so that a graph can capture it."""
    given, results = [rows.decoding(value[0])[:, None] for value in inputs], []
    width = max(rows.num_decode, 1) if layer.batches else 1
    for start in range(0, rows.num_decode, width):
        slots = rows.decode_slots[start : start + width]
        result, after = layer.step([value[start : start + width] for value in given], [state[slots] for state in states])
        results.append(result[:, 0])
        for state, now in zip(states, after, strict=True):
            state[slots] = now
    if results:
        rows.put_decoded(output[0], torch.cat(results))


class TokenByToken(RecurrentRunner):
    """Runs one request, one token at a time, as decoding does."""

    def plan(self, batch: Batch) -> RecurrentPlan:
        """The plan for a batch of one request without cached tokens."""
        (slot,), device = batch.state_slots_host, batch.slots.device
        none = torch.empty(0, dtype=torch.int64, device=device)
        first = StateRows(none, none, Extends([0], [1], [slot], [True], device))
        spaced = torch.arange(batch.num_tokens, device=device)[:, None].repeat(1, 2)  # rows are 16-byte aligned, as in a step
        rows = spaced[:, :1].unbind()
        return RecurrentPlan(batch.num_tokens, (first, *(StateRows(row, torch.full_like(row, slot), None) for row in rows[1:])))


class OnlyKernels(RecurrentRunner):
    """For `backends.compiling.compile_ahead`: skips ops without a kernel, since there is nothing to compile."""

    def kernels(self, layer_id: int) -> Kernels:
        return _Served(super().kernels(layer_id))


class _Served(dict[Callable[..., None], Kernel]):
    def get(self, truth: Any, default: Any = None) -> Kernel:
        kernel = super().get(truth)
        return lambda *given: (kernel is not None and kernel(*given)) or True


def runner_of(
    layers: Sequence[RecurrentLayer], num_requests: int, device: torch.device, kind: type[RecurrentRunner] = RecurrentRunner
) -> RecurrentRunner | None:
    """A runner with its own pool, filled with NaN, for checking `num_requests` requests; None for a model without recurrent layers."""
    if not layers:
        return None
    pool = StatePool([layer.spec for layer in layers], num_requests + 1, device)
    pool.fill(float("nan"))
    return kind(layers, pool)
