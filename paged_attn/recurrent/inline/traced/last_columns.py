"""Convolutions of which only the last columns are used compute only those, as a window of the last rows is read only once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_WHOLE = 2**63 - 1
_ALONG = {aten.silu.default, aten._to_copy.default, aten.clone.default}
_WITH = {aten.add.Tensor, aten.mul.Tensor}


def with_last_columns(graph: fx.Graph) -> None:
    """Moves a slice of the last columns of a convolution's result before the convolution, and before what is done with each column."""
    for node in list(graph.nodes):
        kept = _last(node)
        if not kept:
            continue
        along = [node.args[0]]
        while along[-1].target is not aten.convolution.default and (given := _given(along[-1])) is not None:
            along.append(given)
        convolution = along[-1]
        if not _slides(convolution) or any(len(each.users) > 1 for each in along):
            continue
        taps = convolution.args[1].meta["val"].shape[2]
        rows = convolution.args[0]
        with graph.inserting_before(convolution):
            last = graph.call_function(aten.slice.Tensor, (rows, 2, -(taps + kept - 1), _WHOLE))
        last.meta["val"] = rows.meta["val"][:, :, -(taps + kept - 1) :]
        convolution.replace_input_with(rows, last)
        for each in along:
            each.meta["val"] = each.meta["val"][:, :, -kept:]
        if node.target is aten.select.int:
            node.args = (along[0], node.args[1], 0)
        else:
            node.replace_all_uses_with(along[0])
            graph.erase_node(node)


def _last(node: fx.Node) -> int:
    """How many of the last columns of a tensor [rows, channels, columns] a node shows; 0: all, or others."""
    if node.target not in (aten.slice.Tensor, aten.select.int) or len(node.args) > 4:
        return 0
    given, dim, start, *end = node.args
    shape = given.meta["val"].shape  # type: ignore[union-attr]
    if len(shape) != 3 or dim not in (2, -1) or not isinstance(start, int):
        return 0
    count = shape[2] - start if start >= 0 else min(-start, shape[2])
    if node.target is aten.select.int:
        return 1 if count == 1 < shape[2] else 0
    to_end = not end or end[0] is None or (isinstance(end[0], int) and end[0] >= shape[2])
    return count if to_end and count < shape[2] else 0


def _given(node: fx.Node) -> fx.Node | None:
    """The tensor [rows, channels, columns] of which a node computes each column alike."""
    if node.target in _ALONG:
        return node.args[0]  # type: ignore[return-value]
    if node.target not in _WITH or node.kwargs:
        return None
    columns = node.meta["val"].shape[2]
    whole = [each for each in node.args if isinstance(each, fx.Node) and tuple(each.meta["val"].shape) == tuple(node.meta["val"].shape)]
    others = [each for each in node.args if each not in whole]
    alike = all(not isinstance(each, fx.Node) or each.meta["val"].dim() == 0 or each.meta["val"].shape[-1] == 1 for each in others)
    return whole[0] if len(whole) == 1 and alike and columns > 1 else None


def _slides(node: fx.Node) -> bool:
    """Whether it is a convolution along the columns, one by one, without padding."""
    if node.target is not aten.convolution.default or node.args[0].meta["val"].dim() != 3:  # type: ignore[union-attr]
        return False
    form: Any = node.args[3:8]
    stride, padding, dilation, transposed, _ = form
    return (list(stride), list(padding), list(dilation), transposed) == ([1], [0], [1], False)
