"""Serves a sharded model as a rank's own modules, with plain parameters and forwards with collectives, until the engine is closed."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.calling.call_signature import plain_inputs, takes
from paged_attn.calling.plain_modes import evaluating
from paged_attn.parallel.local_forwards import equal_on_all_ranks, local_forward
from paged_attn.parallel.plan import Plan, plan_of
from paged_attn.parallel.ranks import Ranks
from paged_attn.passes.fx.model_facts import model_dtype
from paged_attn.tolerances import logits_apart

GATHERED = ("colwise_gather_output", "colwise_rep")
PROBE_TOKENS = 12
_entered: weakref.WeakKeyDictionary[nn.Module, LocalModel] = weakref.WeakKeyDictionary()


class LocalModel:
    """A model that transformers sharded, without DTensors and without its hooks, which torch.compile and captured graphs do not take.

    Calls of the model give what they gave before; that is checked on entry. Logits are the same, bit for bit, on all ranks: they are
    gathered, so that each is computed by one rank alone, or the first rank's are sent to the others.

    Attributes:
        ranks: the processes that hold the shards.
        cut: modules that have a shard of a parameter.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.ranks = Ranks(plan.group)
        self._users = 0
        self._undo = ExitStack()
        head = _output_module(model)
        with evaluating(model), ExitStack() as undo:
            expected = _probe(model)
            self.cut = cut = self._take_local_parameters(model, undo)
            for name, module in model.named_modules():
                style = plan.styles.get(name)
                forward = None if style is None else local_forward(name, module, style, self.ranks, module in cut)
                if module is head and style not in GATHERED:
                    if style == "colwise" and module in cut:
                        raise UnsupportedError(
                            f"{name} leaves each rank with a slice of the logits (style 'colwise'); use 'colwise_gather_output'"
                        )
                    forward = equal_on_all_ranks(forward or module.forward, self.ranks)
                if forward is not None:
                    _set_attribute(undo, module, "forward", forward)
                if style == "replicated_with_grad_allreduce":  # a backward hook up to transformers 5.21, which cannot be traced
                    _set_attribute(undo, module, "_backward_hooks", OrderedDict())
                if isinstance(module, nn.Embedding) and module in cut:
                    _set_attribute(undo, module, "padding_idx", None)  # it is not among this rank's rows, and matters only in training
            _check(model, expected, _probe(model))
            self._undo = undo.pop_all()

    def leave(self) -> None:
        """One user less; with the last one the model is as it was found. Weights that moved or were written meanwhile stay written."""
        self._users -= 1
        if self._users == 0:
            self._undo.close()

    def _take_local_parameters(self, model: nn.Module, undo: ExitStack) -> set[nn.Module]:
        """Puts each rank's own tensors in the DTensors' places; returns the modules that have a shard of a parameter."""
        from torch.distributed.tensor import DTensor

        local: dict[int, nn.Parameter] = {}
        cut: set[nn.Module] = set()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if not isinstance(parameter, DTensor):
                    continue
                if id(parameter) not in local:
                    local[id(parameter)] = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
                    undo.callback(_give_back, parameter, local[id(parameter)])
                undo.callback(module._parameters.__setitem__, name, parameter)
                module._parameters[name] = local[id(parameter)]
                if not parameter.placements[0].is_replicate():
                    cut.add(module)
        return cut


def enter_local(model: nn.Module) -> LocalModel | None:
    """The model as this rank's own modules, if it is sharded; engines of one model share that. `leave` ends it. Raises UnsupportedError: it
    is sharded in a way that is not known, or its own modules do not compute what it computed."""
    known = _entered.get(model)
    if known is None or known._users == 0:
        plan = plan_of(model)
        if plan is None:
            return None
        known = _entered[model] = LocalModel(model, plan)
    known._users += 1
    return known


@contextmanager
def served_locally(model: nn.Module) -> Iterator[Ranks | None]:
    """Inside, a sharded model is a rank's own modules; yields its ranks. None for a model that is not sharded."""
    local = enter_local(model)
    try:
        yield None if local is None else local.ranks
    finally:
        if local is not None:
            local.leave()


def is_cut(model: nn.Module, part: nn.Module) -> bool:
    """Whether a module of a model, or one below it, has a shard of a parameter; asked while the model is served."""
    local = _entered.get(model)
    return local is not None and not local.cut.isdisjoint(part.modules())


def _output_module(model: nn.Module) -> nn.Module:
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if not isinstance(head, nn.Module):
        raise UnsupportedError(
            f"{type(model).__name__} does not say which module makes its logits (get_output_embeddings), which must be equal on all ranks"
        )
    return head


def _give_back(parameter: Any, local: nn.Parameter) -> None:
    """The DTensor holds what the parameter that stood for it holds now: merging linears moves that."""
    parameter._local_tensor = local.data


def _set_attribute(undo: ExitStack, module: nn.Module, name: str, value: Any) -> None:
    attributes = vars(module)
    if name in attributes:
        undo.callback(attributes.__setitem__, name, attributes[name])
    else:
        undo.callback(attributes.pop, name, None)
    attributes[name] = value


def _probe(model: nn.Module) -> Tensor:
    device = next(model.parameters()).device
    inputs = plain_inputs(model, torch.arange(1, PROBE_TOKENS + 1, device=device), positions=True)
    if takes(model, "use_cache"):
        inputs["use_cache"] = False
    logits: Tensor = model(**inputs).logits[0]
    return logits


def _check(model: nn.Module, expected: Tensor, got: Tensor) -> None:
    if got.shape != expected.shape:
        raise UnsupportedError(f"{type(model).__name__}: logits of {list(expected.shape)} became {list(got.shape)} on a rank's own tensors")
    error, limit = logits_apart(expected, got, model_dtype(model))
    if not error <= limit:
        raise UnsupportedError(
            f"{type(model).__name__}, sharded by its tp_plan, computes other logits on a rank's own tensors than through transformers' "
            f"hooks, off by {error:.2g} of their size (allowed {limit:g})"
        )
