"""Where adapters may be added to a graph: at a linear layer, or at several merged into one product."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoraPart:
    """One linear layer of the model, by its path, and how many outputs it has."""

    module: str
    rows: int


@dataclass(frozen=True)
class LoraSite:
    """One product of a graph, and the tensors that its `paged_attn::lora` or `lora_up` takes.

    Attributes:
        parts: the linear layers that it computes, in the order of its outputs.
        columns: their number of inputs.
        dtype: of inputs and outputs, and of the adapters' factors.
        of_logits: its rows are those whose logits are wanted, not the tokens of the step.
        weight: if `a` is appended to the rows of the layers' weight, so that one product does both, that weight's index among the graph's
            inputs; None if `a` is an input of its own.
    """

    parts: tuple[LoraPart, ...]
    columns: int
    dtype: torch.dtype
    of_logits: bool
    weight: int | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of outputs of each part."""
        return tuple(part.rows for part in self.parts)

    def shapes(self, slots: int, rank: int) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int]]:
        """Shapes for `slots` adapters of a rank: a [slots, parts * rank, columns], b [slots, sum(rows), rank], scales [slots, parts]."""
        return (slots, len(self.parts) * rank, self.columns), (slots, sum(self.rows), rank), (slots, len(self.parts))
