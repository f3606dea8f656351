"""Keeps recurrent states in fewer bits than the model does, if the user asks for it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Sequence

import torch

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.calling.plain_modes import evaluating
from paged_attn.recurrent.as_ops.by_ops import apart, scopes_of
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.same_kind import kind_of
from paged_attn.recurrent.verify import LIMIT_16_BIT

logger = logging.getLogger("paged_attn")


def with_state_dtype(layers: Sequence[RecurrentLayer], name: str) -> tuple[RecurrentLayer, ...]:
    """The layers with their float32 states in a 16-bit dtype or, for "auto", unchanged.

    Ops compute in float32 and round what they write, so a state is rounded once per decode step, and once at the end of a prompt's chunk.
    Each kind of layer is compared with its own forward, which keeps the model's dtype.

    Raises:
        UnsupportedError: the model computes in float32, a layer runs by its own forward (which returns states of its own dtype), or its
            error is larger than allowed in 16 bits.
    """
    if name == "auto" or not layers:
        return tuple(layers)
    dtype: torch.dtype = getattr(torch, name)
    known: dict[Hashable, RecurrentLayer] = {}
    found = []
    for layer in layers:
        if (kind := kind_of(layer)) not in known:
            known[kind] = _narrowed(layer, dtype)
        found.append(dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, states=known[kind].spec.states)))
    return tuple(found)


def _narrowed(layer: RecurrentLayer, dtype: torch.dtype) -> RecurrentLayer:
    where, asked = layer.spec.module, f"state_dtype={str(dtype).removeprefix('torch.')!r}"
    if layer.output_dtype.itemsize > dtype.itemsize:
        raise UnsupportedError(f"{asked}, but {where} computes in {layer.output_dtype}; only models in 16 bits take it. Leave it out.")
    if not layer.ops:
        raise UnsupportedError(f"{asked}, but {where} runs by its own forward, which returns states of its own dtype. Leave it out.")
    narrow = [dataclasses.replace(state, dtype=dtype) if state.dtype == torch.float32 else state for state in layer.spec.states]
    served = dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, states=tuple(narrow)))
    with torch.no_grad(), evaluating(layer.module):
        error = apart(layer, served, scopes_of([layer.module]))
    if not error <= LIMIT_16_BIT:
        raise UnsupportedError(f"{asked}: {where} is off by {error:.2g} of its size, allowed is {LIMIT_16_BIT:.2g}. Leave it out.")
    logger.info("%s keeps its state in %s (off by %.2g of its size)", where, dtype, error)
    return served
