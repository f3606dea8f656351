"""Proves the mask functions that transformers passes to its mask interface: callables (batch, head, query, key) -> visible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.prove.mask_family import MaskFamily
from paged_attn.passes.prove.mask_proof import unproved

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
REACH = 1 << 18  # positions checked: more than any window or chunk in use
DENSE = 97
WHERE = "a mask that the model builds"  # for messages


class ProvedMask:
    """Takes the place of a mask while a model is being patched; a model that changes its mask after building it is refused."""

    def __init__(self, family: MaskFamily) -> None:
        self.family = family

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f".{name}")

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse(f"[{index}]")

    def _refuse(self, how: str) -> NoReturn:
        raise UnsupportedError(
            f"the model uses {how} of its attention mask after building it, which paged_attn.patch cannot follow; "
            "use torch.compile(model, backend='paged_attn'), which proves the mask that reaches each layer"
        )


def prove_mask_function(function: MaskFunction) -> MaskFamily:
    """The family of a mask function of indices.

    The last row shows the window, the diagonal below the main one the chunk. Both are then checked on all pairs of the first 97 tokens
    and on random pairs over 262,144 positions.

    Raises:
        UnsupportedError: it is of no known family (the message draws its first rows), or reads a table of the call that it was made for.
    """
    try:
        return _proved(function)
    except IndexError as error:
        raise UnsupportedError(
            f"{WHERE} cannot be proved: its mask function reads a table of the call's own tokens ({error}), such as which of them are "
            "of one image; use torch.compile(model, backend='paged_attn'), which proves the mask that reaches each layer"
        ) from error


def _proved(function: MaskFunction) -> MaskFamily:
    def visible(query: Tensor, key: Tensor) -> Tensor:
        zero = torch.zeros(1, dtype=torch.int64)
        return function(zero, zero, query, key).broadcast_to(torch.broadcast_shapes(query.shape, key.shape))

    index = torch.arange(DENSE)
    dense = visible(index[:, None], index[None, :]).numpy()
    every = torch.arange(REACH)
    if bool(visible(every[:-1], every[1:]).any()):
        family = MaskFamily(causal=False)
    else:
        breaks = torch.nonzero(~visible(every[1:], every[:-1])).flatten()
        chunk = int(breaks[0]) + 1 if len(breaks) else None
        last = (chunk or REACH) - 1
        width = int(visible(torch.tensor([last]), torch.arange(last + 1)).sum())
        family = MaskFamily(True, width if width <= last else None, chunk)
        if chunk == 1:
            family = MaskFamily(True, window=1)
    generator = torch.Generator().manual_seed(0)
    query = torch.randint(0, REACH, (20000,), generator=generator)
    key = (query - torch.randint(-64, 20000, (20000,), generator=generator)).clamp(0, REACH - 1)
    agrees = torch.equal(visible(query, key), family.sees(query, key))
    if not np.array_equal(family.matrix(DENSE), dense) or not agrees:
        raise unproved(WHERE, dense, "its mask function is not of a known family")
    return family
