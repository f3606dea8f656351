"""The interface of a runner, which runs the engine's model: `TracedRunner` (traced and rewritten) or `HookedRunner` (hooked, not
compiled)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.check.runs.served import Served
from paged_attn.engine.model.model_output import TokenIds
from paged_attn.engine.model.model_state import Difference
from paged_attn.parallel.ranks import Ranks
from paged_attn.recurrent.layer import RecurrentLayer


class Runner(Protocol):
    """A model on one device, called on rows of tokens under a forward context.

    Attributes:
        layers: the attention layers, for a pool.
        token_ids: of the model.
        max_positions: the longest sequence; max_rows: the most tokens of one call; None without limit.
        length_borders: numbers of tokens, ascending: a request that exceeds one of them needs other keys than before (longrope).
        recurrent: the layers with recurrent state.
        ranks: the processes that hold the shards of the model and run it together; None for a whole one.
        runs_as: how the model is called, as text.
        one_row: a step of one request is faster as one row.
        experts_per_choice: number of experts per chosen expert, in layers of experts; 0 if there are none.
        follows_the_model: calls run the model as it is at that time, with adapters and hooks, not a graph of its earlier state.
    """

    follows_the_model: bool
    model: nn.Module
    device: torch.device
    dtype: torch.dtype
    token_ids: TokenIds
    layers: tuple[AttentionSpec, ...]
    recurrent: tuple[RecurrentLayer, ...]
    max_positions: int | None
    max_rows: int | None
    length_borders: tuple[int, ...]
    ranks: Ranks | None
    one_row: bool
    experts_per_choice: int

    @property
    def runs_as(self) -> str: ...

    @property
    def owned(self) -> dict[str, Tensor]:
        """The tensors of the model that calls read by address, by name."""

    def forward(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """input_ids, positions [T] and logits_rows [N], int64 -> logits [N, vocabulary] of those rows."""

    def served(self) -> Served:
        """The model as it runs, for checks that look inside."""

    def computes_the_same(self) -> bool:
        """Whether the model computes on a few tokens the same as the graph, or without a graph, the same as at the last `remember`."""

    def changed_attention(self, found: Difference) -> list[str]:
        """The changes that attention does not follow, because it was proved from earlier values: descriptions of layers or tensors."""

    def remember(self) -> None:
        """Make the model's current results the reference of `computes_the_same`."""

    def reads(self, name: str) -> bool:
        """Whether calls read this parameter or buffer as the model's own object, wherever its memory is."""

    def close(self) -> None:
        """Leave the model as it was found."""
