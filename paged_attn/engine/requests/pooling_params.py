"""The parameters of a text that is embedded or scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from paged_attn.shown import shown
from paged_attn.truncation import checked_truncation

PoolingKind: TypeAlias = Literal["last", "mean", "cls"]
KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)


@dataclass(frozen=True)
class PoolingParams:
    """Parameters for one text.

    Attributes:
        pooling: "last" and "cls" take the hidden state of the last and of the first token, "mean" the mean over all of them.
        token_types: of each token, for models that read two texts at once; None: 0 for all.
        truncate_prompt_tokens: of a longer text only the first so many tokens count; -1: as many as there is room for.

    Raises:
        ValueError: another pooling, or a number of tokens that is none.
    """

    pooling: PoolingKind
    token_types: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        checked_truncation(self.truncate_prompt_tokens)
        if self.pooling not in KINDS:
            raise ValueError(f"pooling: got {shown(self.pooling)}; allowed: {', '.join(map(repr, KINDS))}")
