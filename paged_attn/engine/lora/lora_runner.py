"""The runner of steps with adapters: a model's runner with the other graph, which is beside its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.context import current_context
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.check.runs.traced_served import TracedServed
from paged_attn.compiled.graph_inputs import logits_of
from paged_attn.compiled.lora_graph import LoraGraph
from paged_attn.engine.lora.lora_pool import LoraPool
from paged_attn.engine.runners.merged_weights import with_spare_rows
from paged_attn.engine.runners.model_runner import ModelRunner
from paged_attn.parallel.ranks import Ranks
from paged_attn.recurrent.layer import RecurrentLayer


class LoraRunner:
    """Another `Runner` of the same model, whose batches say each row's adapter (`LoraSlots.given`).

    Args:
        slots, rank: those that the graph was made for.
    """

    follows_the_model = False

    def __init__(self, base: ModelRunner, graph: LoraGraph, slots: int, rank: int) -> None:
        self.base, self.graph = base, graph
        bound = base.inputs.all
        self._weights = {merge.inputs[0]: with_spare_rows(bound[merge.inputs[0]], merge) for merge in graph.widened}
        self.adapters = LoraPool(base.model, graph.sites, slots, rank, base.device, self._weights)
        self.model: nn.Module = base.model
        self.device: torch.device = base.device
        self.dtype: torch.dtype = base.dtype
        self.max_rows: int | None = base.max_rows
        self.ranks: Ranks | None = base.ranks
        self._run = graph.split.gm.forward

    @property
    def layers(self) -> tuple[AttentionSpec, ...]:
        return self.base.layers

    @property
    def max_positions(self) -> int | None:
        return self.base.max_positions

    @property
    def recurrent(self) -> Sequence[RecurrentLayer]:
        return self.base.recurrent

    @property
    def one_row(self) -> bool:
        """Of the graph without adapters, which is compared in one row: both call the same kernels."""
        return self.base.one_row

    @property
    def runs_as(self) -> str:
        return f"{self.base.runs_as}, with adapters"

    @property
    def owned(self) -> dict[str, Tensor]:
        """Those of the model, and the adapters' factors."""
        return {**self.base.owned, **{f"adapters {index}": tensor for index, tensor in enumerate(self.adapters.tensors)}}

    def served(self) -> TracedServed:
        """Of the graph without adapters."""
        return self.base.served()

    def forward(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """As `ModelRunner.forward`.

        Raises:
            ContextError: no forward context, or its batch says nothing of adapters.
        """
        context = current_context()
        slots = None if context is None else (context.batch.lora_slots, context.batch.lora_logits_slots)
        if slots is None or slots[0] is None:
            raise ContextError("LoraRunner.forward needs a forward context whose batch went through LoraSlots.given")
        inputs = self.base.inputs.fill(input_ids, positions, logits_rows)
        for index, weight in self._weights.items():
            inputs[index] = weight
        more = [*slots, *self.adapters.inputs] if self.adapters.sites else []
        logits = logits_of(self._run(*inputs, *more))
        return logits if self.base.takes_logits_rows else logits[logits_rows]

    def computes_the_same(self) -> bool:
        return self.base.computes_the_same()

    def remember(self) -> None:
        self.base.remember()

    def reads(self, name: str) -> bool:
        return self.base.reads(name)

    def close(self) -> None:
        """Nothing: the model is the other runner's."""
