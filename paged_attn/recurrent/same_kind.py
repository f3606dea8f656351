"""Which layers with state are of one kind: their code sees the same in all of them, apart from the values of their weights."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.hashing.stable_hasher import MOST_BYTES, tensor_digest
from paged_attn.recurrent.cache_state import Path
from paged_attn.recurrent.layer import RecurrentLayer

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
_TENSORS = (Tensor, nn.Parameter)
_NUMBERS = ("layer_idx", "layer_id")  # attributes that hold a layer's number
_DYNAMO = "_dynamo_"  # what Dynamo notes on tensors that it has seen


def kind_of(layer: RecurrentLayer) -> Hashable:
    """Equal for layers of one kind, judged without running them.

    Their modules have the same classes, attributes, buffers and hooks, and parameters of one form. An attribute that is not plain data must
    be the same object: a function, a config. So a layer with a forward or a hook of its own is a kind of its own. Its number is left out.
    """
    given = {name: value for name, value in layer.arguments.items() if name != layer.cache_name}
    call = (layer.positional, layer.operands, layer.outputs, layer.output_length, layer.output_dtype, layer.unused, layer.state_at)
    states = tuple((state.shape, state.dtype) for state in layer.spec.states), tuple(map(_unnumbered, layer.template.state_paths))
    return _module(layer.module), call, states, _seen(given, values=False)


def _module(module: nn.Module) -> Hashable:
    return tuple((path, type(part), _attributes(part)) for path, part in module.named_modules())


def _attributes(part: nn.Module) -> Hashable:
    own = {name: value for name, value in vars(part).items() if name not in ("_parameters", "_modules")}
    numbers = {name: type(own.pop(name)) for name in _NUMBERS if isinstance(own.get(name), int)}
    parts = tuple((name, type(child)) for name, child in part._modules.items())
    return _seen(own), tuple(numbers.items()), parts, _seen(part._parameters, values=False)


def _seen(value: Any, values: bool = True) -> Hashable:
    """What code can tell of a value; of tensors without `values` only their form."""
    if type(value) in _PLAIN:
        return type(value), repr(value)
    if type(value) in _TENSORS:
        return _tensor(value, values)
    if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        return type(value), tuple((_seen(key), _seen(each, values)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value), tuple(_seen(each, values) for each in value)
    if type(value) in (set, frozenset):
        return type(value), frozenset(map(_seen, value))
    if type(value) is functools.partial:
        return type(value), id(value.func), _seen((value.args, value.keywords))
    return type(value), id(value)


def _tensor(value: Tensor, values: bool) -> Hashable:
    if value.layout != torch.strided or (values and value.nbytes > MOST_BYTES):
        return type(value), id(value)
    noted = {name: each for name, each in vars(value).items() if not name.startswith(_DYNAMO)}
    form = value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return type(value), form, _seen(noted), tensor_digest(value) if values else ""


def _unnumbered(path: Path) -> Path:
    """A path in a cache without the number of the layer."""
    return tuple((kind, 0 if isinstance(key, int) else key) for kind, key in path)
