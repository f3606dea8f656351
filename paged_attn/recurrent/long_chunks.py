"""Decides which layers with their own forward may continue a state with many tokens at once.

A forward may take another path in longer calls (fused up to 64 tokens, chunks of 64 or 256 beyond), and what holds for the few tokens of
`verify.py` need not hold there.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from paged_attn.attn_ops.model_code import MODEL_ERRORS
from paged_attn.calling.plain_modes import evaluating
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.same_kind import kind_of
from paged_attn.recurrent.verify import (
    FORMULAS_APART,
    LIMIT,
    allowed_error,
    difference,
    error_in_float32,
    in_parts,
    stepwise,
    undefined,
)
from paged_attn.recurrent.watching.call_parts import Undefined
from paged_attn.tolerances import row_errors, typical, worst

logger = logging.getLogger("paged_attn")
TOKENS, ENDS = 600, (1, 4, 300)  # of the call, and of its parts
STEPS = 80  # tokens that also run one by one
AFTER, LIMIT_16_BIT = 4, 0.25  # the first rows of a part, which a forgotten state moves most, where rounding adds up over so many tokens


def with_long_chunks(layers: Sequence[RecurrentLayer]) -> tuple[RecurrentLayer, ...]:
    """The layers; those without ops keep `chunks` only if chunks of some hundred tokens are right, too. Each kind of layer is tried once.

    Raises:
        Undefined: results token by token and for many tokens at once differ.
    """
    known: dict[Hashable, bool] = {}
    found = []
    for layer in layers:
        if not layer.ops:
            kind = kind_of(layer)
            if kind not in known:
                with torch.no_grad(), evaluating(layer.module):
                    known[kind] = _takes_long_chunks(layer)
                if layer.chunks and not known[kind]:
                    logger.info("%s runs token by token after the first chunk: longer chunks are wrong", layer.spec.module)
            layer = dataclasses.replace(layer, chunks=layer.chunks and known[kind])
        found.append(layer)
    return tuple(found)


def _takes_long_chunks(layer: RecurrentLayer) -> bool:
    """Also checks that many tokens at once give what they give one by one, most of them: rounding adds up over so many steps."""
    try:
        few = _repeated(layer, STEPS)
        (at_once, _), ((steps, _), _) = layer.run(few, None), stepwise(layer, few)
        if not (apart := typical(row_errors(at_once.flatten(0, 1), steps.flatten(0, 1)))) <= FORMULAS_APART:
            in_numbers = error_in_float32(layer, few)
            if in_numbers is None or not in_numbers <= FORMULAS_APART:
                raise undefined(layer, STEPS, apart)
        if not layer.chunks:
            return False
        inputs = _repeated(layer, TOKENS)
        whole = layer.run(inputs, None)
        parts = in_parts(layer, inputs, ENDS)
    except (Undefined, torch.OutOfMemoryError):
        raise
    except MODEL_ERRORS as failure:  # raised by the model's own code
        logger.info("%s does not run on %d tokens: %s: %s", layer.spec.module, TOKENS, type(failure).__name__, failure)
        return False
    if whole[0].dtype.itemsize >= 4:
        return difference(whole, parts) <= max(LIMIT, allowed_error(whole, layer.own_error))
    first = torch.tensor([end + row for end in ENDS for row in range(AFTER)], device=whole[0].device)
    return worst(row_errors(whole[0][:, first].flatten(0, 1), parts[0][:, first].flatten(0, 1))) <= LIMIT_16_BIT


def _repeated(layer: RecurrentLayer, count: int) -> list[Tensor]:
    """The layer's inputs, their rows repeated; positions go on counting, as a forward may take position 0 for a first call."""
    found = []
    for value in layer.given:
        rows = torch.arange(count, device=value.device)
        counts = value.dtype == torch.int64 and value.dim() == 2 and value[0].equal(rows[: value.shape[1]])
        found.append(rows[None] if counts else value[:, rows % value.shape[1]])
    return found
