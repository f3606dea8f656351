"""What `matmul_ogs` wants to know of sorted pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paged_attn.backends.experts.triton.grouped import sorted_pairs

SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class RowsByExpert:
    """`pairs` [T k]: the pair of each row; `counts` [E]: rows of each expert; both int32; `metadata`: where blocks of rows begin."""

    pairs: Tensor
    counts: Tensor
    metadata: Any

    def routing(self, top_k: int) -> Any:
        """For a product that reads row pair // top_k of its operand where it gathers."""
        from triton_kernels.matmul_ogs import RoutingData

        return RoutingData(None, self.counts, len(self.counts), top_k, self.metadata)


def rows_by_expert(ids: Tensor, experts: int) -> RowsByExpert:
    """`ids` [T, k] is contiguous; those of no expert come last, where no block is."""
    from triton_kernels.tensor import make_ragged_tensor_metadata

    pairs, _, counts = sorted_pairs(ids, experts, SMALLEST_BLOCK)
    counts = counts[:experts]
    return RowsByExpert(pairs, counts, make_ragged_tensor_metadata(counts, ids.numel()))
