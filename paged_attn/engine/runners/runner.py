"""What the engine needs of whatever runs the model: `TracedRunner` (traced and rewritten) or `HookedRunner` (hooked, not compiled)."""

from __future__ import annotations

from collections.abc import Sequence
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
        max_positions: the longest sequence, None without limit; max_rows: the most tokens of one call, likewise.
        recurrent: the layers with recurrent state.
        ranks: the processes that hold the shards of the model and run it together; None for a whole one.
        runs_as: for people: how the model is called.
        one_row: a step of one request gains from being one row.
        experts_per_choice: of a layer of experts, for each that a token chooses; 0 where there is none that is known.
        follows_the_model: calls compute what the model is then, adapters and hooks included, and not a graph of what it was.
    """

    follows_the_model: bool

    model: nn.Module
    device: torch.device
    dtype: torch.dtype
    token_ids: TokenIds
    max_rows: int | None
    ranks: Ranks | None

    @property
    def layers(self) -> tuple[AttentionSpec, ...]: ...

    @property
    def max_positions(self) -> int | None: ...

    @property
    def length_borders(self) -> tuple[int, ...]:
        """Numbers of tokens, ascending: a request that has more than one of them needs other keys than it had before (longrope)."""

    @property
    def recurrent(self) -> Sequence[RecurrentLayer]: ...

    @property
    def runs_as(self) -> str: ...

    @property
    def one_row(self) -> bool: ...

    @property
    def experts_per_choice(self) -> int: ...

    @property
    def owned(self) -> dict[str, Tensor]:
        """The tensors of the model that calls read by address, by name."""

    def forward(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        """input_ids, positions [T] and logits_rows [N], int64 -> logits [N, vocabulary] of those rows."""

    def served(self) -> Served:
        """The model as it runs, for checks that look inside."""

    def computes_the_same(self) -> bool:
        """Whether the model computes on a few tokens what calls compute (a graph), or what it did when it was last remembered."""

    def changed_attention(self, found: Difference) -> list[str]:
        """What of these changes attention does not follow, as it was proved from what was there before: layers or tensors, in words."""

    def remember(self) -> None:
        """From now on what the model computes now is the same."""

    def reads(self, name: str) -> bool:
        """Whether calls read this parameter or buffer as the model's own object, wherever its numbers lie."""

    def close(self) -> None:
        """Leave the model as it was found."""
