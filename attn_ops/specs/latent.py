"""The spec of a layer whose keys and values are linear maps of one narrow row per token (MLA of DeepSeek V2 and similar models)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from paged_attn.attn_ops.specs.attention import AttentionSpec


class HeadRows(NamedTuple):
    """The rows of a weight [rows, rank] that make keys or values: `start + h * stride + d * step` makes element d of head h."""

    start: int
    stride: int
    step: int = 1

    def of(self, weight: Tensor, heads: int, dim: int) -> Tensor:
        """[heads, dim, rank] of a weight, as a view."""
        row, column = weight.stride()
        strides = (self.stride * row, self.step * row, column)
        return weight.as_strided((heads, dim, weight.shape[1]), strides, weight.storage_offset() + self.start * row)


@dataclass(frozen=True, kw_only=True)
class LatentSpec(AttentionSpec):
    """k = [W_UK latent, rotated] and v = W_UV latent, with a map for each head and a rotated part (or none) that all heads share.

    A token is stored as one row: the latent, then the rotated part. Queries that are mapped by W_UK meet that row directly. So for
    pool and backends this is attention with one KV head, whose key is the row and whose value is the row's first `rank` elements:
    num_kv_heads is 1, qk_head_dim is rank + rotated, v_head_dim is rank. The fields below describe the model's own attention.

    Attributes:
        rotated: width of the shared part of keys; 0 without one.
        key_dim: width of a head's keys without the rotated part; the model's query heads are `key_dim + rotated` wide.
        value_dim: width of a head's values, and of its output.
        rotated_first: whether the rotated part of queries (and keys) comes first.
        keys, values: the rows of the op's weights; None: the model maps queries and outputs itself, so that its queries meet the row
            as it is, and its values are the latent.
    """

    rotated: int
    key_dim: int
    value_dim: int
    rotated_first: bool = False
    keys: HeadRows | None
    values: HeadRows | None

    @property
    def rank(self) -> int:
        """Width of the latent."""
        return self.v_head_dim

    @property
    def kv_elements(self) -> int:
        """Elements of the pool that one token takes: values are part of the keys' row."""
        return self.qk_head_dim

    @property
    def expanded(self) -> AttentionSpec:
        """The model's own attention, over keys and values made from the rows."""
        return AttentionSpec(
            self.num_q_heads, self.num_q_heads, self.key_dim + self.rotated, self.value_dim, self.scale, self.causal, module=self.module
        )

    def split(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """The part of queries [.., key_dim + rotated] that meets the latent, and the rotated part."""
        at = self.rotated if self.rotated_first else self.key_dim
        first, second = query[..., :at], query[..., at:]
        return (second, first) if self.rotated_first else (first, second)

    def describe(self) -> str:
        """One line: `16 heads of one latent of 512 + 64 rotated, dim 192/128, causal, scale 0.1147`."""
        row = f"{self.rank} + {self.rotated} rotated" if self.rotated else str(self.rank)
        dims = f"dim {self.key_dim + self.rotated}/{self.value_dim}"
        return f"{self.num_q_heads} heads of one latent of {row}, {dims}, causal, scale {self.scale:.4g}"
