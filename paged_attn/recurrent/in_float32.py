"""A 16-bit layer's twin in float32, in which its ops are proved: in 16 bits, ops with decays that are a tenth too small are off by no more
than rounding is."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paged_attn.recurrent.layer import RecurrentLayer

_PLAIN = (Tensor, nn.Parameter)


def in_float32(layer: RecurrentLayer) -> RecurrentLayer | None:
    """The layer with a copy of its module, and with arguments, output and states in float32; the copy is not verified yet. None for a layer
    in float32 already, and for a module whose tensors are not plain ones (quantised, sharded) or whose forward was replaced: a copy of it
    would not be the same."""
    if layer.output_dtype.itemsize >= 4:
        return None
    owned = [*layer.module.parameters(), *layer.module.buffers()]
    if any(type(tensor) not in _PLAIN for tensor in owned) or any("forward" in vars(module) for module in layer.module.modules()):
        return None
    states = tuple(dataclasses.replace(state, dtype=_wide(state.dtype)) for state in layer.spec.states)
    return dataclasses.replace(
        layer,
        spec=dataclasses.replace(layer.spec, states=states),
        module=copy.deepcopy(layer.module).float(),
        arguments=tree_map(_widened, layer.arguments),
        output_dtype=torch.float32,
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _widened(value: Any) -> Any:
    return value.to(_wide(value.dtype)) if isinstance(value, Tensor) else value
