"""Calling a graph whose code may depend on the length of the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.model_code import model_code


class NoAttention:
    """A backend for runs that call no paged attention."""

    def plan(self, batch: Batch, pool: KVPool) -> None: ...

    def plan_in_graph(self, plan: None) -> None: ...


@contextmanager
def must_run(what: str, on: str) -> Iterator[None]:
    """A graph that breaks at another length than the traced one was specialised to that length."""
    failed = f"self-check failed: {what} can not run {on}"
    with model_code(lambda why: UnsupportedError(f"{failed}: {why}. The model's code depends on the length.")):
        yield
