"""Binds a model's parameters to a graph with merged linears: the parameters become views of one tensor."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.passes.optimize.linears.merge import Merge
from paged_attn.passes.optimize.linears.mergeable_weights import is_ordinary_parameter, lie_in_a_row

logger = logging.getLogger("paged_attn")


def bind_merged(args: Sequence[Any], merges: Sequence[Merge]) -> list[Any]:
    """The graph's inputs with each merge's first one replaced by the merged tensor, which takes over the parameters' memory.

    The parameters stay the model's own: their `data` becomes a view of the merged tensor, one merge after the other, so that the old memory
    is free before the next is allocated. Reading, saving and loading in place go on as before. Whoever else kept the old memory
    (`tensor = weight.data`, a CUDA graph) is no longer tied to the parameter. Parameters that lie in a row already, and need no spare rows,
    are not moved. Spare rows are zeros.

    Args:
        args: the flat inputs with which the graph was rewritten.

    Raises:
        ValueError: an input is not the parameter that the pass saw.
    """
    bound, moved = list(args), 0
    with torch.inference_mode(False), torch.no_grad():
        for merge in merges:
            parameters = _parameters(args, merge)
            if merge.spare or not lie_in_a_row(parameters):
                _move_together(parameters, merge.spare)
                moved += 1
            bound[merge.inputs[0]] = _spanned(parameters)
    if moved and parameters[0].is_cuda:
        torch.cuda.empty_cache()  # the pool is sized by the memory that the driver reports as free
    if merges:
        logger.info("%d merged tensors: %d made, %d found in memory", len(merges), moved, len(merges) - moved)
    return bound


def _parameters(args: Sequence[Any], merge: Merge) -> list[nn.Parameter]:
    parameters = [args[index] for index in merge.inputs]
    for index, parameter, rows in zip(merge.inputs, parameters, merge.rows, strict=True):
        if not is_ordinary_parameter(parameter) or parameter.shape[0] != rows:
            got = f"{type(parameter).__name__} of shape {tuple(getattr(parameter, 'shape', ()))}"
            raise ValueError(f"input {index} of the graph is a {got}, but a parameter of {rows} rows was merged; pass the traced inputs")
    return parameters


def with_spare_rows(bound: Tensor, merge: Merge) -> Tensor:
    """A merged tensor of `bind_merged`, and the rows behind it; whoever writes those does not count as a writer of the parameters."""
    return bound.data.as_strided((len(bound) + merge.spare, *bound.shape[1:]), bound.stride())


def _move_together(parameters: Sequence[nn.Parameter], spare: int) -> None:
    first, sizes = parameters[0].data, [len(parameter) for parameter in parameters]
    merged = torch.cat([*(parameter.data for parameter in parameters), first.new_zeros((spare, *first.shape[1:]))])
    for parameter, part in zip(parameters, merged[: sum(sizes)].split(sizes), strict=True):
        parameter.data = part


def _spanned(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor over parameters that lie in a row."""
    first = parameters[0].detach()
    shape = (sum(len(p) for p in parameters), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())
