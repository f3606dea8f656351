"""Checks that a graph traced for two or more rows computes the same for one.

Its operations are valid for any number of rows, and no guard of the trace requires two; but while it traces, torch assumes that a size is
neither 0 nor 1. So the check runs what will be served, compiled pieces included, on numbers, with the same inputs for each piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.batch.step_buffers import MIN_ROWS, StepShape
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import CaptureError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.model_code import model_code
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.attention.by_group import without_groups
from paged_attn.check.runs.boundaries import Boundary
from paged_attn.check.runs.served import Served, VisitBoundary
from paged_attn.check.runs.truth import LOGITS
from paged_attn.engine.runners.runner import Runner
from paged_attn.recurrent.run import RecurrentRunner, runner_of
from paged_attn.tolerances import rounding, row_errors, worst

TOKENS = ((2, 3), (3, 1), (1, 2), (4, 3))  # token ids of the request, tried in turn; models are traced with such ids, too
ROUNDINGS = 16  # allowed difference: a few dozen operations on rows at another index of the batch


class OneRowCheck:
    """`check_one_row` of a runner, once for a pool and its backend: graphs of all lengths rest on it, and those with adapters."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._pool: KVPool | None = None
        self._backend: AttentionBackend | None = None
        self._why_not = ""

    def check(self, pool: KVPool, backend: AttentionBackend) -> None:
        """Raises CaptureError, as `check_one_row` does."""
        if pool is not self._pool or backend is not self._backend:
            self._pool, self._backend, self._why_not = pool, backend, ""
            try:
                check_one_row(self._runner.served(), *without_groups(pool, backend, 2))
            except CaptureError as error:
                self._why_not = str(error)
        if self._why_not:
            raise CaptureError(self._why_not)


def check_one_row(served: Served, pool: KVPool, backend: AttentionBackend) -> None:
    """Compare a decode step of one request in one row with the same step in two, in page 1, which nobody may use yet: every value between
    two pieces, what every attention gives, and the logits. Where a router may choose otherwise, some of the tries agree.

    Raises:
        CaptureError: something differs in every try, or one row cannot be run.
    """
    least: dict[str, float] = {}
    for tokens in TOKENS:
        for name, error in _errors(served, pool, backend, tokens).items():
            least[name] = min(error, least.get(name, error))
    limit = ROUNDINGS * rounding(served.kv_dtype)
    for name, error in least.items():
        if not error <= limit:
            raise CaptureError(f"one row alone gives {name} that are off by {error:.2g} of their size (allowed {limit:.2g})")


def _errors(served: Served, pool: KVPool, backend: AttentionBackend, tokens: tuple[int, int]) -> dict[str, float]:
    pages = [1] * -(-len(tokens) // pool.page_size)  # the pool may have no other
    first, second = (BatchRequest([token], pages, cached, state_slot=1) for cached, token in enumerate(tokens))
    states = runner_of(served.recurrent, 2, pool.device)
    beside: dict[str, Tensor] = {}
    errors: dict[str, float] = {}

    def keep(boundary: Boundary, value: Tensor) -> Tensor:
        beside[boundary.original] = value.clone()
        return value

    def compare(boundary: Boundary, value: Tensor) -> Tensor:
        expected = _first_row(beside[boundary.original], value)
        if expected is None:
            return value
        errors[f"values ({boundary.original})"] = worst(row_errors(expected.reshape(1, -1), value.reshape(1, -1)))
        return torch.empty_like(value).copy_(expected.reshape(value.shape))  # compiled code asks for the strides that one row has

    _run(served, pool, backend, states, first, None, lambda _, value: value)
    if states is not None:
        states.pool.copy(1, 2)  # each of the two steps advances its own
    in_two = _run(served, pool, backend, states, second, StepShape(MIN_ROWS, MIN_ROWS, MIN_ROWS), keep)
    with model_code(lambda why: CaptureError(f"one row cannot be run: {why}")):  # whatever compiled code meets in such a size
        alone = _run(served, pool, backend, states, second._replace(state_slot=2), StepShape(1, 1, 1), compare)
    errors[LOGITS.removeprefix("the ")] = worst(row_errors(in_two[:1], alone[:1]))
    return errors


def _run(
    served: Served, pool: KVPool, backend: AttentionBackend, states: RecurrentRunner | None, request: BatchRequest,
    shape: StepShape | None, visit: VisitBoundary,
) -> Tensor:  # fmt: skip
    """Logits [N, vocabulary], the request's first."""
    batch = Batch.build([request], pool.page_size, pool.device, shape)
    with ForwardContext(batch, pool, backend, states), torch.no_grad():
        return served.run(batch, visit)


def _first_row(two: Tensor, one: Tensor) -> Tensor | None:
    """The first of two rows, along the one axis in which the shapes differ; None if there is none."""
    axes = [axis for axis in range(two.dim()) if two.shape[axis] != one.shape[axis]]
    if len(axes) != 1 or one.shape[axes[0]] != 1:
        return None
    return two.narrow(axes[0], 0, 1)
