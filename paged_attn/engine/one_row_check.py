"""Whether a graph that was traced for two rows and more computes the same for one.

Its operations are those of any number of rows, and no guard of the trace asks for two; but torch, while it traces, takes for granted that a
size is neither 0 nor 1. So it is tried on numbers, with what runs: compiled pieces and all.
"""

from __future__ import annotations

from torch import Tensor

from paged_attn.attn_ops.batch import Batch
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import CaptureError
from paged_attn.attn_ops.kv_pool import KVPool
from paged_attn.attn_ops.step_buffers import MIN_ROWS, StepShape
from paged_attn.backends.base import AttentionBackend
from paged_attn.engine.runner import Runner
from paged_attn.ragged_probe import relative_error, tolerance


def check_one_row(runner: Runner, pool: KVPool, backend: AttentionBackend) -> None:
    """Compare a decode step of one row with the same row beside another; both write page 0 only.

    Raises:
        CaptureError: the logits differ, or one row can not be run.
    """
    beside = _logits(runner, pool, backend, MIN_ROWS)
    try:
        alone = _logits(runner, pool, backend, 1)
    except (RuntimeError, AssertionError, IndexError, ValueError, TypeError) as error:  # whatever compiled code meets in such a size
        raise CaptureError(f"one row can not be run: {type(error).__name__}: {error}") from error
    error_of, limit = relative_error(beside[:1], alone), tolerance(alone.dtype)
    if not error_of <= limit:
        raise CaptureError(f"one row alone gives logits that are off by {error_of:.2g} of their size (allowed {limit:g})")


def _logits(runner: Runner, pool: KVPool, backend: AttentionBackend, rows: int) -> Tensor:
    batch = Batch.build([], pool.page_size, runner.device, StepShape(rows, rows, rows))
    with ForwardContext(batch, pool, backend):
        return runner.forward(batch.input_ids, batch.positions, batch.logits_rows)
