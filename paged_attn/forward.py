"""`paged_attn.forward_context`: the public API for running a step."""

from __future__ import annotations

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.backends.attention.base import AttentionBackend
from paged_attn.backends.selection.select import select_for_pool
from paged_attn.recurrent.states import ContextWithStates, RecurrentStates


def forward_context(
    batch: Batch,
    pool: KVPool,
    backend: str | AttentionBackend = "auto",
    deterministic: bool = False,
    states: RecurrentStates | None = None,
) -> ForwardContext:
    """`with forward_context(batch, pool): logits = compiled(**batch.model_inputs()).logits`

    Args:
        batch: what this step runs; build it with the pool's page size.
        pool: holds K and V; allocated for the model's layers.
        backend: "auto", a registered name, two names as "fa3,flashinfer" (prefill, decode), or a backend object (select once and reuse it).
        deterministic: use only a batch-invariant backend. A backend object must have been created with deterministic=True.
        states: for a model with recurrent layers; the batch's requests name their slots.

    Raises:
        ValueError: an unknown backend name; or `deterministic` with an object that was not made so.
        UnsupportedError: the backend cannot run some layer; the message says why.
        ContextError: batch and pool disagree, or a request has a page that the pool lacks; or, on use, the context is entered twice or
            left out of order, or nothing ran on pages in it.
    """
    _check_pages(batch, pool)
    if isinstance(backend, str):
        backend = select_for_pool(backend, pool, deterministic=deterministic).backend
    elif deterministic and not backend.deterministic:
        raise ValueError(f"deterministic=True, but the {backend.name} backend was made without it; make it with deterministic=True")
    context = ForwardContext(batch, pool, backend) if states is None else ContextWithStates(batch, pool, backend, states)
    context.must_run = True
    return context


def _check_pages(batch: Batch, pool: KVPool) -> None:
    tables = [batch.page_table_host, *(group.page_table_host for group in batch.groups)]
    largest = max((int(table.max(initial=0)) for table in tables if table is not None), default=0)
    if largest >= pool.num_pages:
        raise ContextError(
            f"a request of the batch has page {largest}; allowed are 1 to {pool.num_pages - 1}, the pages of this pool but the reserved one"
        )
