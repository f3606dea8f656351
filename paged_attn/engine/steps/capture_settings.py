"""What is captured, in which sizes, and under which budget."""

from __future__ import annotations

from dataclasses import dataclass

from paged_attn.attn_ops.batch.step_buffers import MIN_ROWS
from paged_attn.capture.graphs.buckets import bucket_sizes, coarse_to_fine

SMALLEST_EXTEND = 16


@dataclass(frozen=True)
class CaptureSettings:
    """Attributes:
    full: capture decode steps whole, attention included.
    max_requests, max_rows: the largest decode step and the most rows of any step.
    decode_sizes, extend_sizes: how many sizes of each there shall be.
    budget_bytes: device memory for all graphs.
    strict: a shape that can not be captured is an error.
    verify: compare every replay with the model uncaptured.
    one_row: a step of one request is captured as one row, and not padded to two.
    """

    full: bool
    max_requests: int
    max_rows: int
    decode_sizes: int
    extend_sizes: int
    budget_bytes: int
    strict: bool = False
    verify: bool = False
    one_row: bool = False

    def decode_order(self) -> list[int]:
        """Sizes of full graphs in the order of their capture."""
        return coarse_to_fine(bucket_sizes(self.max_requests, self.decode_sizes, 1 if self.one_row else MIN_ROWS))

    def extend_order(self) -> list[int]:
        """Rows of captured pieces, likewise."""
        return coarse_to_fine(bucket_sizes(self.max_rows, self.extend_sizes, min(SMALLEST_EXTEND, max(self.max_rows, MIN_ROWS))))
