"""States for custom engines on `torch.compile(model, backend="paged_attn")`: kept by the caller, passed to the forward context."""

from __future__ import annotations

import itertools
import threading
import weakref
from contextlib import ExitStack
from types import TracebackType

from torch import nn

from paged_attn.attn_ops.batch.batch import Batch
from paged_attn.attn_ops.context import Backend, ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.kv.state_pool import SlotAllocator, StatePool
from paged_attn.passes.fx.model_facts import model_device
from paged_attn.recurrent.as_ops.by_ops import with_ops
from paged_attn.recurrent.as_ops.state_dtype import with_state_dtype
from paged_attn.recurrent.as_ops.wrap import Switch, replaced_by_ops
from paged_attn.recurrent.discover import find_recurrent_layers, without_engine
from paged_attn.recurrent.long_chunks import with_long_chunks
from paged_attn.recurrent.run import RecurrentRunner, runner_of

_known: weakref.WeakKeyDictionary[nn.Module, RecurrentStates] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)


class RecurrentStates:
    """One slot per request for the state of a model's recurrent layers, as in Qwen3-Next or Mamba.

    `with forward_context(batch, pool, states=states): compiled(**batch.model_inputs())`, where each `BatchRequest` has a `state_slot`
    allocated from `slots`. A request without cached tokens starts from a fresh state; its slot need not be cleared. Outside such a
    context a call computes what the model computes. Several threads may hold contexts at once; a thread that calls the model outside one
    at the same time may get a ContextError.

    Attributes:
        name: unique to these states.
        layers: the recurrent layers, in execution order.
        pool: [num_slots, ...] per state; slot 0 is for padding.
        slots: allocates slots 1 to num_slots - 1.

    Args:
        model: in eval mode; like torch.compile, this does not keep it alive.
        num_slots: at least 2.
        scans_backend, state_dtype: the backend of the recurrences and the dtype of stored states, as in `EngineConfig`.

    Raises:
        UnsupportedError: the model has no recurrent layer, or one that cannot run by itself or token by token.
        ValueError: fewer than two slots; or the model already has states.
    """

    def __init__(self, model: nn.Module, num_slots: int, scans_backend: str = "auto", state_dtype: str = "auto") -> None:
        if model in _known:
            raise ValueError(f"this {type(model).__name__} already has RecurrentStates; close them first")
        self.device = model_device(model)
        with without_engine(model) as inputs_of:
            layers = with_long_chunks(with_ops(find_recurrent_layers(model, inputs_of), scans_backend))
            self.layers = with_state_dtype(layers, state_dtype)
        if not self.layers:
            raise UnsupportedError(f"{type(model).__name__} has no layer with recurrent state; leave RecurrentStates and states= out")
        self.pool = StatePool([layer.spec for layer in self.layers], num_slots, self.device)
        self.slots = SlotAllocator(num_slots)
        self.runner = RecurrentRunner(self.layers, self.pool)
        self._open, self._lock, self._switch, self._undo = 0, threading.Lock(), Switch(""), ExitStack()
        self.name = f"states {next(_numbers)}"
        self._undo.enter_context(replaced_by_ops(self.layers, self._switch))
        self._model = weakref.ref(model)
        _known[model] = self

    def close(self) -> None:
        """Restores the model's modules. Graphs compiled in the meantime no longer run in any context."""
        self._undo.close()
        model = self._model()
        if model is not None and _known.get(model) is self:
            del _known[model]

    def _count(self, contexts: int) -> None:
        with self._lock:
            self._open += contexts
            self._switch.on = self.name if self._open else ""


class ContextWithStates(ForwardContext):
    """While it is open, torch.compile traces the model's recurrent layers as ops.

    Args:
        traced: the call only traces: the graph runs unchanged and stores no state.
    """

    def __init__(self, batch: Batch, pool: KVPool, backend: Backend, states: RecurrentStates, traced: bool = False) -> None:
        runner = runner_of(states.layers, batch.num_real_requests, states.device) if traced else states.runner
        super().__init__(batch, pool, backend, runner)
        self._states, self.rewritten = states, not traced

    def __enter__(self) -> ForwardContext:
        super().__enter__()
        self._states._count(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._states._count(-1)
        super().__exit__(kind, error, trace)


def states_of(model: nn.Module) -> RecurrentStates | None:
    """The open states of a model."""
    return _known.get(model)
