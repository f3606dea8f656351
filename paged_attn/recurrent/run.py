"""The body of the recurrent op: each extending request through the layer's own forward, all decoding ones as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.calling.evaluating import evaluating
from paged_attn.recurrent.layer import RecurrentLayer


@dataclass(frozen=True)
class Extend:
    """Rows `start` to `end` of the batch extend the request in `slot`; `fresh` if it has no state yet."""

    start: int
    end: int
    slot: int
    fresh: bool


@dataclass(frozen=True)
class RecurrentPlan:
    """Decoding requests (one new token, state present) by their rows and slots [D] int64; the others one by one."""

    num_tokens: int
    decode_rows: Tensor
    decode_slots: Tensor
    extends: tuple[Extend, ...]


class RecurrentRunner:
    """The recurrent layers of one model over one pool; a forward context takes it beside the attention backend."""

    def __init__(self, layers: Sequence[RecurrentLayer], pool: StatePool) -> None:
        self.layers, self.pool = tuple(layers), pool

    def plan(self, batch: Batch) -> RecurrentPlan:
        """Raises ContextError: a request has no slot, one that the pool lacks, or another one's."""
        slots = batch.state_slots_host
        wrong = [s for s in slots if not 1 <= s < self.pool.num_slots or slots.count(s) > 1]
        if wrong:
            raise ContextError(
                f"the batch's requests have state slots {list(slots)}; allowed are 1 to {self.pool.num_slots - 1}, each once: "
                "take them from a SlotAllocator"
            )
        extends: list[Extend] = []
        rows: list[int] = []
        decoding: list[int] = []
        start = 0
        for new, seen, slot in zip(batch.query_lens_host, batch.seq_lens_host, slots, strict=True):
            if new == 1 and seen > 1:
                rows.append(start)
                decoding.append(slot)
            else:
                extends.append(Extend(start, start + new, slot, seen == new))
            start += new
        on_device = [torch.tensor(values, dtype=torch.int64).to(batch.slots.device, non_blocking=True) for values in (rows, decoding)]
        return RecurrentPlan(batch.num_tokens, on_device[0], on_device[1], tuple(extends))

    def forward(self, plan: RecurrentPlan, layer_id: int, inputs: Sequence[Tensor], output: Tensor) -> None:
        """inputs [1, T, ...] in the order of the layer's operands; output [1, T, ...]; the states in the pool advance."""
        layer, states = self.layers[layer_id], self.pool.states(layer_id)
        with evaluating(layer.module) if layer.module.training else nullcontext():
            for extend in plan.extends:
                rows, slots = slice(extend.start, extend.end), slice(extend.slot, extend.slot + 1)
                before = None if extend.fresh else [state[slots].clone() for state in states]
                parts, after = layer.run_tokens([value[:, rows] for value in inputs], before)
                output[:, rows] = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
                for state, now in zip(states, after, strict=True):
                    state[slots] = now
            self._decode(layer, states, plan, inputs, output)
        output[:, plan.num_tokens :] = 0

    @staticmethod
    def _decode(layer: RecurrentLayer, states: Sequence[Tensor], plan: RecurrentPlan, inputs: Sequence[Tensor], output: Tensor) -> None:
        count = plan.decode_rows.shape[0]
        width = max(count, 1) if layer.batches else 1
        for start in range(0, count, width):
            rows, slots = plan.decode_rows[start : start + width], plan.decode_slots[start : start + width]
            before = [state[slots] for state in states]
            result, after = layer.run([value[0, rows, None] for value in inputs], before)
            output[0, rows] = result[:, 0]
            for state, now in zip(states, after, strict=True):
                state[slots] = now


def runner_of(layers: Sequence[RecurrentLayer], num_requests: int, device: torch.device) -> RecurrentRunner | None:
    """A runner over a pool of its own, filled with NaN, for a check of so many requests; None for a model without recurrent layers."""
    if not layers:
        return None
    pool = StatePool([layer.spec for layer in layers], num_requests + 1, device)
    pool.fill(float("nan"))
    return RecurrentRunner(layers, pool)
