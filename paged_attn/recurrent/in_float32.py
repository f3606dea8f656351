"""A 16-bit layer's twin in float32, in which its ops are proved: in 16 bits, ops with decays that are a tenth too small are off by no more
than rounding is."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from paged_attn.attn_ops.model_code import model_may_fail
from paged_attn.recurrent.layer import RecurrentLayer

logger = logging.getLogger("paged_attn")
_PLAIN = (Tensor, nn.Parameter)


def in_float32(layer: RecurrentLayer) -> RecurrentLayer | None:
    """The layer with a copy of its module, and with arguments, output and states in float32; the copy is not verified yet.

    None for a layer in float32 already; for a module whose tensors are not plain ones (quantised, sharded) or whose forward was replaced: a
    copy would not be the same; for one that holds modules beside its own, such as the whole model, which would be copied, too; and for one
    that cannot be copied: it holds a lock, or memory is full.
    """
    if layer.output_dtype.itemsize >= 4:
        return None
    tensors, modules = [*layer.module.parameters(), *layer.module.buffers()], set(layer.module.modules())
    if any(type(tensor) not in _PLAIN for tensor in tensors):
        return None
    if any("forward" in vars(module) or _others(module, modules) for module in modules):
        return None
    try:
        with model_may_fail() as failures:
            module = copy.deepcopy(layer.module).float()
    except torch.OutOfMemoryError as error:
        failures = [error]
    if failures:
        logger.info("%s has no copy in float32: %s", layer.spec.module, failures[0])
        return None
    states = tuple(dataclasses.replace(state, dtype=_wide(state.dtype)) for state in layer.spec.states)
    return dataclasses.replace(
        layer,
        spec=dataclasses.replace(layer.spec, states=states),
        module=module,
        arguments=tree_map(widened, layer.arguments),
        output_dtype=torch.float32,
    )


class _Narrowed(TorchDispatchMode):
    """Whether something was rounded to 16 bits inside."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.is_floating_point() and result.dtype.itemsize < 4:
            self.found = True
        return result


def rounds_to_16_bits(twin: RecurrentLayer) -> bool:
    """Whether its forward names a 16-bit dtype, so that it rounds in float32, too."""
    with torch.no_grad(), _Narrowed() as seen:  # type: ignore[no-untyped-call]
        twin.run(twin.given, None)
    return bool(seen.found)


def _others(module: nn.Module, own: set[nn.Module]) -> bool:
    """Whether a module's attributes, or lists and dicts among them, hold modules that are none of `own`."""
    held = tree_leaves([value for name, value in vars(module).items() if name != "_modules"])
    return any(isinstance(value, nn.Module) and value not in own for value in held)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def widened(value: Any) -> Any:
    """A tensor of 16-bit numbers in float32; anything else as it is."""
    return value.to(_wide(value.dtype)) if isinstance(value, Tensor) else value
