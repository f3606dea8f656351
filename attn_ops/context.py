"""The forward context: the batch, pool and backend that op bodies of this thread use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.current_device import current_device
from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.kv.kv_pool import KVPool

if TYPE_CHECKING:
    from torch import Tensor

    from paged_attn.attn_ops.specs.attention import AttentionSpec


class _Active(threading.local):
    """The active contexts of this thread, the innermost last."""

    def __init__(self) -> None:
        self.contexts: list[ForwardContext] = []


_active = _Active()


class Backend(Protocol):
    """What the context needs of a backend; the full contract is `paged_attn.backends.attention.base.AttentionBackend`."""

    def plan(self, batch: Batch, pool: KVPool) -> Any: ...

    def plan_in_graph(self, plan: Any) -> None: ...

    def forward(
        self, plan: Any, layer_id: int, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        *, save_kv_cache: bool, sinks: Tensor | None = None, bias: Tensor | None = None, lse_out: Tensor | None = None,
    ) -> None: ...  # fmt: skip

    def forward_latent(self, context: ForwardContext, call: Any) -> None: ...


class Recurrent(Protocol):
    """What the context needs to run layers with recurrent state; implemented by `paged_attn.recurrent.run.RecurrentRunner`."""

    def plan(self, batch: Batch) -> Any: ...

    def forward(self, plan: Any, layer_id: int, inputs: Sequence[Tensor], output: Tensor) -> None: ...

    def state(self, layer_id: int, state_id: int) -> Tensor: ...

    def kernels(self, layer_id: int) -> Mapping[Callable[..., None], Callable[..., bool]]: ...


class NoAttention:
    """A backend for steps without paged attention, or whose attention kernels are not compiled ahead."""

    def plan(self, batch: Batch, pool: KVPool) -> None: ...

    def plan_in_graph(self, plan: Any) -> None: ...

    def forward(self, *_: Any, **__: Any) -> None: ...

    def forward_latent(self, *_: Any) -> None: ...


def without_attention(batch: Batch, dtype: torch.dtype, recurrent: Recurrent | None = None) -> ForwardContext:
    """The context of a step without paged attention, over a pool of this dtype without layers."""
    return ForwardContext(batch, KVPool((), 2, batch.page_size, dtype, batch.slots.device), NoAttention(), recurrent)


class ForwardContext:
    """`with ForwardContext(batch, pool, backend):` runs one step on one pool. Enter it once, in the thread that runs the model.

    The plan is made on entry, unless `plan` was made before (for a captured graph, which contains its device work). Inside, gradients are
    off and the pool's device is current. Contexts nest (a draft model inside a target's step), and are restored even after exceptions.

    Args:
        plans_late: plans are made when an op first reads them, so that the device has the work before it meanwhile.

    Attributes:
        plan, recurrent_plan: of the backend and of `recurrent`; None outside the context.
        rewritten: a compiled model runs its rewritten graph instead of the traced one.
        ran: one of our ops or compiled graphs has run in it.
        must_run: leaving the context before that raises ContextError.
    """

    rewritten, ran, must_run = True, False, False

    def __init__(
        self, batch: Batch, pool: KVPool, backend: Backend, recurrent: Recurrent | None = None, plan: Any = None, plans_late: bool = False
    ) -> None:
        if batch.page_size != pool.page_size:
            raise ContextError(
                f"the batch has pages of {batch.page_size} tokens, the pool of {pool.page_size}; "
                f"build the batch with page_size={pool.page_size}"
            )
        self.batch, self.pool, self.backend, self.recurrent = batch, pool, backend, recurrent
        self._plan, self._recurrent_plan, self._plans_late = plan, None, plans_late
        self._plan_is_due = self._recurrent_plan_is_due = False
        self.latent_plan: Any = None  # made by the first latent layer of the step
        self._entered = False
        self._gradients = True
        self._undo = ExitStack()
        self._guard = threading.Lock()

    @property
    def layers(self) -> Sequence[AttentionSpec]:
        return self.pool.layers

    @property
    def plan(self) -> Any:
        if self._plan_is_due:
            self._plan_is_due = False
            self._plan = self.backend.plan(self.batch, self.pool)
            self.backend.plan_in_graph(self._plan)
        return self._plan

    @property
    def recurrent_plan(self) -> Any:
        if self._recurrent_plan_is_due and self.recurrent is not None:
            self._recurrent_plan_is_due = False
            self._recurrent_plan = self.recurrent.plan(self.batch)
        return self._recurrent_plan

    def __enter__(self) -> ForwardContext:
        with self._guard:
            if self._entered:
                raise ContextError(
                    "this forward context was entered before; a context is one step of one thread: make a new one for each step"
                )
            self._entered = True
        with ExitStack() as undo:
            undo.enter_context(current_device(self.pool.device))
            self._plan_is_due, self._recurrent_plan_is_due = self._plan is None, True
            if not self._plans_late:
                _ = self.plan, self.recurrent_plan  # makes them
            self._undo = undo.pop_all()
        self._gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        _active.contexts.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stack = _active.contexts
        if not stack or stack[-1] is not self:
            if self in stack:  # its block has ended, so it must not stay active
                del stack[stack.index(self) :]
                torch.set_grad_enabled(self._gradients)
                self._undo.close()
            raise ContextError("forward contexts must be left in the reverse order and in the thread in which they were entered")
        stack.pop()
        torch.set_grad_enabled(self._gradients)
        self._undo.close()
        self._plan = self._recurrent_plan = self.latent_plan = None
        self._plan_is_due = self._recurrent_plan_is_due = False
        if self.must_run and kind is None and not self.ran:
            raise ContextError(
                "nothing ran on pages in this forward context: the model was not compiled with backend='paged_attn' or patched, or "
                "torch.compile gave it up (torch._dynamo.config.recompile_limit); what it gave takes the batch's requests for one"
            )


def current_context() -> ForwardContext | None:
    """The innermost context of this thread, or None outside any. For op bodies only: never read it while tracing."""
    return _active.contexts[-1] if _active.contexts else None


def context_of(op: str, rows: int) -> ForwardContext:
    """The thread's context, for the op of this name, whose tensors have `rows` rows.

    Raises:
        ContextError: there is none, or its batch has a different number of rows.
    """
    context = current_context()
    if context is None:
        raise ContextError(f"{op} was called outside any forward context; wrap the call in `with paged_attn.forward_context(batch, pool):`")
    if rows != context.batch.num_rows:
        raise ContextError(
            f"{op} got {rows} rows but the forward context's batch has {context.batch.num_rows}; call the model with batch.model_inputs()"
        )
    context.ran = True
    return context


def recurrent_context_of(op: str, layer_id: int, rows: int) -> tuple[ForwardContext, Recurrent]:
    """`context_of`, and its runner for layers with recurrent state.

    Raises:
        ContextError: also if the context has no such runner.
    """
    context = current_context()
    if context is None or context.recurrent is None:
        where = "outside any forward context" if context is None else "in a forward context without recurrent state"
        raise ContextError(
            f"{op} of recurrent layer {layer_id} was called {where}; run the model through paged_attn.LLM, which keeps the state of "
            "every request"
        )
    return context_of(f"{op} of recurrent layer {layer_id}", rows), context.recurrent
