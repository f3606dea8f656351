"""Decides which layers with their own forward captured decode steps may contain, by their numbers and their launches.

A replay launches what the recording did. So a layer is held if it launches the same for requests of other lengths: a length or a position
that it knows as a number of Python would be a constant of the graph. What only a GPU shows, as a copy that waits, ends the capture itself.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from paged_attn.attn_ops.kv.state_pool import StatePool
from paged_attn.attn_ops.model_code import MODEL_ERRORS
from paged_attn.attn_ops.scans.state_rows import RecurrentPlan, StateRows
from paged_attn.calling.plain_modes import evaluating
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.run import RecurrentRunner
from paged_attn.recurrent.same_kind import kind_of
from paged_attn.recurrent.verify import Result, ages, allowed_error, difference, stepwise

logger = logging.getLogger("paged_attn")
AGES = ((1, 4, 7), (8, 2, 5))  # cached tokens of each request, in two steps of one graph
SLOTS = (4, 0, 1, 2)  # slot of each row in the step; slot 0 is padding
REAL = tuple(row for row, slot in enumerate(SLOTS) if slot)
aten = torch.ops.aten
_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CONSTANTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}


def with_graphs(layers: Sequence[RecurrentLayer]) -> tuple[RecurrentLayer, ...]:
    """The layers; those without ops have `why_not_in_graphs`. Each kind of layer is tried once."""
    known: dict[Hashable, str] = {}
    found = []
    for layer in layers:
        if not layer.ops:
            kind = (layer.batches, layer.mapped, kind_of(layer))
            if kind not in known:
                with torch.no_grad(), evaluating(layer.module):
                    why = known[kind] = _why_not(layer)
                logger.info("full graphs %s %s%s", "leave out" if why else "hold", layer.spec.module, why and f": {why}")
            layer = dataclasses.replace(layer, why_not_in_graphs=known[kind])
        found.append(layer)
    return tuple(found)


def _why_not(layer: RecurrentLayer) -> str:
    if not layer.batches:
        return "it decodes requests one by one"
    inputs = layer.given
    _, along = stepwise(layer, inputs)
    logs = []
    for steps in AGES:
        rows, states, expected = ages(inputs, along, steps)
        try:
            log, got = _step(layer, rows, states)
        except NotCapturable as reason:
            return str(reason)
        except torch.OutOfMemoryError:
            raise
        except MODEL_ERRORS as failure:  # raised by the model's own code
            return f"with padding it raises {type(failure).__name__}: {failure}"
        logs.append(log)
        error, allowed = difference(expected, got), allowed_error(expected, layer.own_error)
        if not error <= allowed:
            return f"with padding it differs by {error:.2g} of its size; {allowed:.2g} is allowed"
    apart = first_difference(*logs)
    return f"what it launches depends on more than its tensors: {apart}" if apart else ""


def _step(layer: RecurrentLayer, rows: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[list[str], Result]:
    """The launches of a decode step [N, 1, ...] with padding rows and states of NaN, and the requests' outputs and states."""
    device = rows[0].device
    slots, real = (torch.tensor(values, device=device) for values in (SLOTS, REAL))
    pool = StatePool([layer.spec], max(SLOTS) + 2, device)
    for kept, state in zip(pool.states(0), states, strict=True):
        if kept.is_floating_point():
            kept.fill_(float("nan"))
        kept[slots[real]] = state
    given = [value.new_full((1, len(SLOTS), *value.shape[2:]), float("nan") if value.is_floating_point() else 0) for value in rows]
    for padded, value in zip(given, rows, strict=True):
        padded[0, real] = value[:, 0]
    output = torch.full((1, len(SLOTS), *layer.output_shape), float("nan"), dtype=layer.output_dtype, device=device)
    runner, plan = RecurrentRunner([layer], pool), RecurrentPlan(len(SLOTS), (StateRows(None, slots, None),))
    launches = Launches(
        [*given, *pool.states(0), slots, output], [*layer.module.parameters(), *layer.module.buffers(), *layer.template.tensors]
    )
    with launches:
        runner.forward(plan, 0, given, output)
    return launches.log, (output[0, real][:, None], [state[slots[real]] for state in pool.states(0)])


class NotCapturable(RuntimeError):
    """Why a graph cannot hold a call; the message continues the word "it"."""


class Launches(TorchDispatchMode):
    """Inside, `log` gets one line per operation: its name, its numbers, and the origins of its tensors.

    Args:
        given: tensors that may differ between calls, at fixed addresses.
        kept: tensors that are the same in all calls.

    Raises:
        NotCapturable: during the call, if it asks for a value of a tensor, or reads a tensor of any other origin.
    """

    def __init__(self, given: Sequence[Tensor], kept: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[str] = []
        self._origins = {id(tensor): f"kept {id(tensor)}" for tensor in kept} | {id(t): f"given {i}" for i, t in enumerate(given)}
        self._alive: list[Any] = []  # an id is only unique while its object is alive
        self._made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _VALUES & set(func.tags) and not (func is aten.index.Tensor and not _masks(args[1])):
            raise NotCapturable(f"it asks for values of a tensor ({func})")
        if func in _CONSTANTS and id(args[0]) not in self._origins:
            self._origins[id(args[0])] = f"constant {args[0].dtype} {args[0].device} {args[0].tolist()}"
        self.log.append(f"{func} {tree_map_only(Tensor, lambda tensor: self._origin(tensor, func), (args, kwargs))}")
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self._origins:
                self._origins[id(leaf)] = f"made {self._made}"
                self._made += 1
        self._alive.append((args, kwargs, result))
        return result

    def _origin(self, tensor: Tensor, func: Any) -> str:
        if id(tensor) not in self._origins:
            raise NotCapturable(f"it reads a tensor {list(tensor.shape)} in {func} that is neither a parameter nor a buffer of the module")
        return f"{self._origins[id(tensor)]} {list(tensor.shape)}"


def _masks(indices: Any) -> bool:
    """Whether one of them is a mask: then the number of chosen elements depends on the data."""
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)


def first_difference(one: Sequence[str], other: Sequence[str]) -> str:
    """The first difference in words; "" if both are equal."""
    for first, second in zip(one, other, strict=False):
        if first != second:
            return f"{first} in one step, {second} in another"
    return "" if len(one) == len(other) else f"{len(one)} operations in one step, {len(other)} in another"
