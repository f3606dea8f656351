"""What a layer of dual chunk attention computes (Qwen2.5-1M's; An et al., 2024, https://arxiv.org/abs/2402.17463)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from paged_attn.attn_ops.specs.attention import AttentionSpec, ChunkPart

PARTS: tuple[ChunkPart, ...] = ("intra", "successive", "inter")


@dataclass(frozen=True)
class DualChunkSpec(AttentionSpec):
    """Causal attention with three queries per token and one softmax: which query meets key j depends on the chunks of i and j.

    Key j <= i meets one of token i's queries:

        intra-chunk         j is in the same chunk, `i // chunk == j // chunk`
        successive-chunk    j is in the chunk before it
        inter-chunk         j is farther back

    The model's graph rotates queries and keys. The pool holds keys as the model rotates them, by their position within the chunk. The
    paper's local size is part of the successive queries.

    Attributes:
        chunk: tokens of a chunk, the paper's s - w (in config.json: chunk_size - local_size); at least 2.
    """

    chunk_part: ChunkPart = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = (self.sliding_window, self.softcap, self.alibi_slopes, self.bias_index) == (None,) * 4
        if self.chunk_part != "all" or self.chunk is None or self.chunk < 2 or self.has_sinks or self.gives_lse or not plain:
            raise ValueError(
                f"{self.module or 'attention'}: dual chunk attention has a chunk of 2 tokens or more and no other feature: {self}"
            )

    @cached_property
    def parts(self) -> tuple[AttentionSpec, ...]:
        """Three attentions over the same keys, in the order of `PARTS`, whose results are merged by their log-sum-exps."""
        own = {f.name: getattr(self, f.name) for f in fields(AttentionSpec)}
        return tuple(AttentionSpec(**own | {"chunk_part": part, "gives_lse": True}) for part in PARTS)

    def describe(self) -> str:
        """One line: `4 heads over 2 KV, dim 8, causal, dual chunks of 24, scale 0.354`."""
        return super().describe().replace(f"chunk {self.chunk:g}, all chunks", f"dual chunks of {self.chunk}")
