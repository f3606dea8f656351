"""Calling a graph whose code may depend on the length of the call, and reading its logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool


class NoAttention:
    """A backend for runs that call no paged attention."""

    def plan(self, batch: Batch, pool: KVPool) -> None: ...

    def plan_in_graph(self, plan: None) -> None: ...


@contextmanager
def must_run(what: str, on: str) -> Iterator[None]:
    """A graph that breaks at another length than the traced one was specialised to that length."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        raise UnsupportedError(f"self-check failed: {what} can not run {on}: {error}. The model's code depends on the length.") from error


def logits_of(output: Any) -> Tensor:
    """[N, vocabulary] from a graph's flat outputs: the first floating tensor [1, N, ...]."""
    tensors = output if isinstance(output, (tuple, list)) else (output,)
    logits: Tensor = next(t for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.dim() >= 2)
    return logits[0] if logits.dim() == 3 else logits
