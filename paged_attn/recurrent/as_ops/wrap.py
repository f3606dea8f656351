"""Turns recurrent layers, or the functions that they call, into ops during a trace, and restores the model afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.recurrent import RECURRENT_LAYER
from paged_attn.calling.left_as_it_was import replaced_forward
from paged_attn.recurrent.as_ops.by_ops import scopes_of
from paged_attn.recurrent.as_ops.functions import enter_layer, leave_layer, replaced_functions
from paged_attn.recurrent.layer import RecurrentLayer


class Switch:
    """torch.compile guards on `on`: a model is compiled separately with each of its values.

    RecurrentStates use a unique name: Dynamo shares graphs among models of a class, but a graph belongs to one model's states.
    """

    def __init__(self, on: bool | str) -> None:
        self.on = on


@contextmanager
def replaced_by_ops(layers: Sequence[RecurrentLayer], switch: Switch | None = None) -> Iterator[None]:
    """Inside, while torch.compile traces, each layer's module emits `recurrent_layer_with_output` with its index in `layers`.

    If a layer has `ops`, they replace its functions, and the rest of its forward is traced; or its `program` is traced in its place.

    Called without torch.compile, or while the given switch is off, a module computes what it did before.
    """
    wanted = switch or Switch(True)
    with ExitStack() as undo:
        undo.enter_context(replaced_functions(scopes_of([layer.module for layer in layers if layer.ops and layer.program is None])))
        for layer_id, layer in enumerate(layers):
            emitter = (_entering if layer.ops and layer.program is None else _emitter)(layer, layer_id, wanted)
            undo.enter_context(replaced_forward(layer.module, MethodType(emitter, layer.module)))  # a deepcopy binds it to the copy
        yield


def _unbound(module: nn.Module) -> Callable[..., Any]:
    """A module's forward as a function of the module, so that a deepcopy computes with its own weights."""
    bound = module.forward
    if isinstance(bound, MethodType) and bound.__self__ is module:
        return bound.__func__
    return lambda _, *args, **kwargs: bound(*args, **kwargs)


def _entering(layer: RecurrentLayer, layer_id: int, wanted: Switch) -> Callable[..., Any]:
    original, shapes = _unbound(layer.module), [state.shape for state in layer.spec.states]

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (torch.compiler.is_compiling() and wanted.on):
            return original(module, *args, **kwargs)
        enter_layer(layer_id, shapes)
        result = original(module, *args, **kwargs)
        leave_layer()
        return result

    return forward


def _emitter(layer: RecurrentLayer, layer_id: int, wanted: Switch) -> Callable[..., Any]:
    positional, operands = layer.positional, [(operand.name, operand.at, operand.as_rows) for operand in layer.operands]
    known, dtype = layer.unused | {o.name for o in layer.operands}, layer.output_dtype
    ats, shapes, widths = ([o.at for o in layer.outputs], [o.shape for o in layer.outputs], [o.width for o in layer.outputs])
    whole, length, where = layer.output_shape, layer.output_length, layer.spec.module
    original, program = _unbound(layer.module), layer.program

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (torch.compiler.is_compiling() and wanted.on):
            return original(module, *args, **kwargs)
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        for name, value in given.items():
            if isinstance(value, Tensor) and name not in known:
                raise UnsupportedError(f"{where} keeps recurrent state and is given {name} only when the model runs without a cache")
        first = given[operands[0][0]] if operands[0][1] is None else given[operands[0][0]][operands[0][1]]
        tokens = first.shape[1]
        inputs = [as_rows(given[name] if at is None else given[name][at], tokens) for name, at, as_rows in operands]
        if program is None:
            output = inputs[0].new_empty((1, tokens, *whole), dtype=dtype)
            RECURRENT_LAYER(inputs, output, layer_id)
        else:
            output = program.run(module, inputs, layer_id)
        if ats == [None]:
            return output
        parts = [output] if len(ats) == 1 else output.split(widths, -1)
        result: list[Tensor | None] = [None] * length
        for at, part, shape in zip(ats, parts, shapes, strict=True):
            result[at or 0] = part.view(1, tokens, *shape)
        return tuple(result)

    return forward
