"""Whether a graph that was traced for two rows and more computes the same for one.

Its operations are those of any number of rows, and no guard of the trace asks for two; but torch, while it traces, takes for granted that a
size is neither 0 nor 1. So it is tried on numbers, with what runs: compiled pieces and all.
"""

from __future__ import annotations

from torch import Tensor

from paged_attn.attn_ops.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import CaptureError
from paged_attn.attn_ops.kv_pool import KVPool
from paged_attn.attn_ops.step_buffers import MIN_ROWS, StepShape
from paged_attn.backends.base import AttentionBackend
from paged_attn.engine.runner import Runner
from paged_attn.ragged_probe import relative_error, tolerance

TOKENS = (2, 3)  # of a request; models are traced with such ids, too


def check_one_row(runner: Runner, pool: KVPool, backend: AttentionBackend) -> None:
    """Compare a decode step of one request in one row with the same step in two, in page 1, which nobody may use yet.

    Raises:
        CaptureError: the logits differ, or one row can not be run.
    """
    pages = [1] * -(-len(TOKENS) // pool.page_size)  # the pool may have no other
    first, second = (BatchRequest([token], pages, cached) for cached, token in enumerate(TOKENS))
    _logits(runner, pool, backend, first, None)
    beside = _logits(runner, pool, backend, second, StepShape(MIN_ROWS, MIN_ROWS, MIN_ROWS))
    try:
        alone = _logits(runner, pool, backend, second, StepShape(1, 1, 1))
    except (RuntimeError, AssertionError, IndexError, ValueError, TypeError) as error:  # whatever compiled code meets in such a size
        raise CaptureError(f"one row can not be run: {type(error).__name__}: {error}") from error
    off, limit = relative_error(beside, alone), tolerance(alone.dtype)
    if not off <= limit:
        raise CaptureError(f"one row alone gives logits that are off by {off:.2g} of their size (allowed {limit:g})")


def _logits(runner: Runner, pool: KVPool, backend: AttentionBackend, request: BatchRequest, shape: StepShape | None) -> Tensor:
    """Of the request's last token, [1, vocabulary]."""
    batch = Batch.build([request], pool.page_size, runner.device, shape)
    with ForwardContext(batch, pool, backend):
        return runner.forward(batch.input_ids, batch.positions, batch.logits_rows)[:1]
