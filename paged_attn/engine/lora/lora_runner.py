"""The runner for steps with adapters: a model's runner with a second graph beside its own."""

from __future__ import annotations

from torch import Tensor

from paged_attn.attn_ops.context import current_context
from paged_attn.attn_ops.errors import ContextError
from paged_attn.compiled.graph_inputs import logits_of
from paged_attn.compiled.lora_graph import LoraGraph
from paged_attn.engine.lora.lora_pool import LoraPool
from paged_attn.engine.runners.merged_weights import with_spare_rows
from paged_attn.engine.runners.traced_runner import TracedRunner


class LoraRunner(TracedRunner):
    """The same model in the same memory, run by its graph with adapters; batches say each row's (`LoraSlots.given`).

    Args:
        base: keeps the model as it is while it is served; checks of the model are those of its graph, as both call the same kernels.
        slots, rank: those that the graph was made for.
    """

    def __init__(self, base: TracedRunner, graph: LoraGraph, slots: int, rank: int) -> None:
        vars(self).update(vars(base))
        self.base = base  # kept alive: some of what it set up may be undone when it is freed
        bound = self.inputs.all
        self._weights = {merge.inputs[0]: with_spare_rows(bound[merge.inputs[0]], merge) for merge in graph.widened}
        self.adapters = LoraPool(self.model, graph.sites, slots, rank, self.device, self._weights)
        self.graph, self._run = graph, graph.split.gm.forward

    @property
    def runs_as(self) -> str:
        return f"{super().runs_as}, with adapters"

    @property
    def owned(self) -> dict[str, Tensor]:
        """The tensors of the model, and the adapters' factors."""
        return {**super().owned, **{f"adapters {index}": tensor for index, tensor in enumerate(self.adapters.tensors)}}

    def forward(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """As `TracedRunner.forward`.

        Raises:
            ContextError: no forward context, or its batch says nothing of adapters.
        """
        context = current_context()
        slots = None if context is None else (context.batch.lora_slots, context.batch.lora_logits_slots)
        if slots is None or slots[0] is None:
            raise ContextError("LoraRunner.forward needs a forward context whose batch went through LoraSlots.given")
        inputs = self.inputs.fill(input_ids, positions, logits_rows)
        for index, weight in self._weights.items():
            inputs[index] = weight
        more = [*slots, *self.adapters.inputs] if self.adapters.sites else []
        logits = logits_of(self._run(*inputs, *more))
        return logits if self.takes_logits_rows else logits[logits_rows]

    def close(self) -> None:
        """Nothing: the model is the other runner's."""
