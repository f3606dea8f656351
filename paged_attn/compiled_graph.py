"""What the compile backend returns for one Dynamo graph: the original computation, and the paged one under a forward context."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from paged_attn.attn_ops.context import ForwardContext, current_context
from paged_attn.attn_ops.errors import ContextError, UnsupportedError
from paged_attn.attn_ops.ops.kinds import WITH_STATE
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.calling.plain_modes import autocasts
from paged_attn.check.runs.steps import ProbeSettings
from paged_attn.check.self_check import self_check
from paged_attn.compiled.rewritten_graph import RewrittenGraph
from paged_attn.recurrent.discover import refuse_recurrent
from paged_attn.recurrent.states import states_of

logger = logging.getLogger("paged_attn")
_recording = threading.local()


class CompiledGraph(RewrittenGraph):
    """Callable with the graph's flat inputs, as Dynamo calls it.

    Outside any forward context it runs the graph as it was traced, so that the compiled model is a drop-in. Under a context it
    runs the rewritten graph, once the self-check has passed; if this call form cannot be paged, it says why.
    """

    def __post_init__(self, traced_from: nn.Module | None) -> None:
        super().__post_init__(traced_from)
        self._run_paged: Callable[..., Any] | None = None if self.split is None else self.split.gm.forward
        self.stateful_layers = 0 if self.rewrite.gm is None else len(recurrent_layer_ids(self.rewrite.gm.graph))
        states = None if traced_from is None or not self.stateful_layers else states_of(traced_from)
        self.traced_with = "" if states is None else states.name
        # Dynamo runs one graph for several models of a class: each passes the self-check, known by one of its tensors.
        self._marker = self.roles.index("owned") if "owned" in self.roles else None
        self._checked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._baked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by model: the numbers from which its specs were made
        self._check_lock = threading.Lock()
        self._accepted: tuple[AttentionSpec, ...] | None = None

    def __call__(self, *args: Any) -> Any:
        recorded = getattr(_recording, "graphs", None)
        if recorded is not None:
            recorded.append(self)
        context = current_context()
        if context is None:
            return self.original.forward(*args)
        context.ran = True
        if not context.rewritten:
            return self.original.forward(*args)
        if self.changed_numbers(args):
            raise UnsupportedError(
                f"since {type(self.model).__name__} was compiled, other numbers were written into a tensor that its attention's mask, "
                "bias or scale was read from; compile it again (torch._dynamo.reset(), torch.compile)"
            )
        return self.run_paged(context, args)

    def run_paged(self, context: ForwardContext, args: Sequence[Any]) -> Any:
        """Run the rewritten graph for the context's batch.

        Raises:
            UnsupportedError: this call form cannot be paged, or the self-check failed; or autocast is on.
            ContextError: the inputs, the pool or the states do not belong to this batch and model.
        """
        if autocasts():
            raise UnsupportedError(
                "a forward context is active under torch.autocast: the model was traced, and is compared with itself, in its own dtypes. "
                "Convert the model and the pool (model.bfloat16(), KVPool(..., dtype=torch.bfloat16)), and call it without autocast"
            )
        self.refuse_recurrent()
        self._check_states(context)
        if self._run_paged is None:
            raise UnsupportedError(
                f"a forward context is active, but this call of the model cannot run a paged batch: {self.rewrite.not_paged}."
                + (" Call compiled(**batch.model_inputs()) inside the context." if "input_ids" in self.roles else "")
            )
        self._check_call(context, args)
        if self.rewrite.mixes is not None and not self.options.self_check:
            raise self.rewrite.mixes
        self.check(args)
        return self._run_paged(*args)

    def refuse_recurrent(self) -> None:
        """Raises UnsupportedError for a model with recurrent state that neither who captured the graph nor `RecurrentStates` keeps."""
        if self.recurrent is None:
            states = None if self.model is None else states_of(self.model)
            if self.model is not None and states is None:
                refuse_recurrent(
                    self.model, "torch.compile", "paged_attn.RecurrentStates(model, num_slots), made before the model is called, has one"
                )
            self.recurrent = () if states is None else states.layers

    def check(
        self,
        args: Sequence[Any],
        model_logits: Callable[[Tensor], Tensor] | None = None,
        settings: ProbeSettings | None = None,
        traced_args: Sequence[Any] | None = None,
        again: bool = False,
    ) -> None:
        """Run the self-check unless this model passed it or it is switched off; see `self_check` for the arguments.

        Args:
            again: whether or not the model passed it before, and also where it is switched off.
        """
        if self._marker is None or not (again or (self.options.self_check and args[self._marker] not in self._checked)):
            return
        with self._check_lock:
            if args[self._marker] not in self._checked or again:
                self_check(self, args, model_logits, self.model, settings, traced_args)
                self._checked[args[self._marker]] = True

    def changed_numbers(self, args: Sequence[Any], counted: bool = True) -> list[Tensor]:
        """The model's tensors that some spec was made of (a bias, a window, a scale) and that hold other numbers than at the first call.

        Args:
            counted: whoever wrote has counted it, which kernels of fused optimizers do not; without, all are compared.
        """
        if self._marker is None or not self.rewrite.baked:
            return []
        baked = [args[index] for index in self.rewrite.baked]
        known = self._baked.get(args[self._marker])
        if known is None:
            self._baked[args[self._marker]] = [(_mark(tensor), tensor.clone()) for tensor in baked]
            return []
        pairs = zip(baked, known, strict=True)
        return [now for now, (mark, was) in pairs if not (counted and mark == _mark(now)) and _differ(now, was)]

    def _check_states(self, context: ForwardContext) -> None:
        given = getattr(context.recurrent, "layers", None)
        if self.recurrent and (self.stateful_layers < len(self.recurrent) or given is not self.recurrent):
            raise ContextError(
                f"the model has {len(self.recurrent)} layers with recurrent state, and the forward context has not their states; enter "
                "forward_context(batch, pool, states=states) with the RecurrentStates that were made for this model and are not closed"
            )

    def _check_call(self, context: ForwardContext, args: Sequence[Any]) -> None:
        rows = next(args[i].shape[1] for i, role in enumerate(self.roles) if role == "input_ids")
        if rows != context.batch.num_rows:
            raise ContextError(
                f"input_ids has {rows} tokens, but the forward context's batch has {context.batch.num_rows} rows "
                f"({context.batch.num_tokens} tokens, padded to at least 2); call compiled(**batch.model_inputs())"
            )
        if context.pool.layers is not self._accepted:
            _check_layers(self.specs, context.pool.layers)
            self._accepted = context.pool.layers


def _mark(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor's numbers are written, or others are put in their place; of one that counts no writes the place alone."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _differ(now: Tensor, was: Tensor) -> bool:
    return now.device != was.device or now.shape != was.shape or not torch.equal(now, was)


@contextmanager
def recorded_graphs() -> Iterator[list[CompiledGraph]]:
    """The graphs that this thread calls inside the block, in order.

    Dynamo runs one graph for all models of one class and configuration, whichever of them it was compiled for.
    """
    outer, graphs = getattr(_recording, "graphs", None), list[CompiledGraph]()
    _recording.graphs = graphs
    try:
        yield graphs
    finally:
        _recording.graphs = outer


def recurrent_layer_ids(graph: fx.Graph) -> set[int]:
    """Ids of the recurrent layers that the ops of a graph stand for."""
    nodes = [node for node in graph.nodes if node.target in WITH_STATE]
    return {node.args[[argument.name for argument in node.target._schema.arguments].index("layer_id")] for node in nodes}


def _check_layers(graph: Sequence[AttentionSpec], pool: Sequence[AttentionSpec]) -> None:
    if len(graph) != len(pool):
        raise ContextError(
            f"the pool has {len(pool)} attention layers, the model {len(graph)}; allocate it with attention_layers(compiled)"
        )
    for index, (ours, theirs) in enumerate(zip(graph, pool, strict=True)):
        if names := ours.differences(theirs):
            raise ContextError(
                f"layer {index} ({ours.module}) of the pool differs from the model's in {', '.join(names)}; "
                "allocate it with attention_layers(compiled)"
            )
