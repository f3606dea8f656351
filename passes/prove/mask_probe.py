"""Evaluates a mask's subgraph on small concrete inputs, with large literals scaled down so that they matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import LINEARS, as_traced, shape_at, sizes_of, token_dims, value_of
from paged_attn.passes.fx.mask_literals import HIDES, LARGEST_SHOWN
from paged_attn.passes.fx.slicing import evaluate
from paged_attn.passes.prove.bias_family import FloatArray
from paged_attn.passes.prove.mask_family import BoolMatrix, draw
from paged_attn.passes.prove.score_subgraph import zeros_for
from paged_attn.passes.prove.subgraph_probe import ProbeFailed, SubgraphProbe

CONVOLUTIONS = (torch.conv1d, torch.conv2d, F.conv1d, F.conv2d)
LONGEST_TABLE = 4096  # positions of a table that are looked at
SMALLEST_TABLE = 32  # positions needed to tell windows and chunks of the scaled sizes apart


class ShortTable(UnsupportedError):
    """A mask's table has too few positions (`length`) for a proof; it may be one that grows during forward."""

    def __init__(self, what: str, length: int) -> None:
        super().__init__(what)
        self.length = length


@dataclass(frozen=True)
class Seen:
    """A mask's effect on one row of T tokens: visible [T, T], and bias [heads, T, T] float64, 0 where hidden; None without a bias."""

    visible: BoolMatrix
    bias: FloatArray | None = None


class MaskProbe(SubgraphProbe):
    """The subgraph behind one mask (or behind the whole scores).

    Args:
        mask: the mask node passed to an attention; with `products`, the scores passed to its softmax.
        user: that attention.
        products: q.k before any operation on it; evaluated as zeros, so that the scores are mask and bias only.
    """

    def __init__(self, mask: fx.Node, user: fx.Node, form: CallForm, values: Values, where: str, products: fx.Node | None = None) -> None:
        stops = () if products is None else (products,)
        super().__init__(mask, user, form, values, where, stops=stops, products=stops)
        self.products = products
        self.table_ends: list[int] = []  # with LIMITS: the longest probes that the tables cover
        self.stored_end = 0  # length of the stored tensors from whose end rows are taken
        # Heads differ only by what is added to them, and one head of zeros broadcasts: a long probe is cheaper by the number of heads.
        self.one_head = products is not None
        self.first_column = 0  # first key column of the softmax: 1 after a sink
        # A mask that is read from a stored table (or multiplies weights) is only known over that table's length.
        owned = [v for node, v in self.owned.items() if not _is_weight(node)]
        self.stored_length = min(max((size for v in owned for size in v.shape), default=0), LONGEST_TABLE)  # of any dim
        tables = [v.shape[-1] for v in owned if v.dim() >= 2 and v.shape[-1] == v.shape[-2] > 1]
        self.table_length = min(max(tables, default=0), LONGEST_TABLE)
        made = {size for n in self._about_positions if n not in self.owned for size in self._fixed_sizes(n) if size > LARGEST_SHOWN}
        made_length = min(max(made), LONGEST_TABLE) if len(made) > 1 else 0  # of tables that each call makes of parts, which may differ
        # Numbers in a table may begin to matter anywhere in it, so that what is decided on a few lengths is also decided on this one.
        self.longest_table = max(self.stored_length, made_length)
        if 0 < self.table_length < SMALLEST_TABLE:
            what = f"{where}: its mask is read from a table of {self.table_length} positions; a proof needs {SMALLEST_TABLE}"
            raise ShortTable(what, self.table_length)

    def run(self, lengths: Sequence[int], scale: Sequence[int] | None, seed: int) -> Seen:
        """Evaluates the mask on a row of sequences of these lengths; with `scale` None, literals are unchanged.

        Raises:
            UnsupportedError: what is visible differs by head, or the mask is not [.., T, T].
            ProbeFailed: its operations do not run on such a row.
        """
        if self.one_head:
            try:
                return self._run(lengths, scale, seed)
            except ProbeFailed:  # the graph splits the heads, or combines them with another tensor that has all heads
                self.one_head = False
        return self._run(lengths, scale, seed)

    @property
    def num_heads(self) -> int:
        """How many heads of scores a probe computes."""
        return 1 if self.products is None or self.one_head else math.prod(shape_at(self.products, self.form.num_tokens, 1)[:-2])

    def _run(self, lengths: Sequence[int], scale: Sequence[int] | None, seed: int) -> Seen:
        total, given = sum(lengths), {}
        if self.products is not None:  # float64, so that probes add no rounding errors
            zeros = zeros_for(self.products, self.form, total, torch.float64)
            given[self.products] = zeros[tuple(slice(0, 1) for _ in zeros.shape[:-2])] if self.one_head else zeros
        mask = self.evaluate(lengths, scale, seed, given)
        return as_seen(mask if self.products is None else mask[..., self.first_column : self.first_column + total], total, self.where)

    def _fixed_sizes(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a tensor that is as large in every call."""
        return () if token_dims(node, self.form.num_tokens) else tuple(size for size in sizes_of(node) if type(size) is int)

    def evaluate_as_called(self) -> Tensor:
        """The mask of the traced call itself, on its own inputs."""
        given = {node: as_traced(self.values[node]) for node in self.nodes if node.op == "placeholder"}
        for node in self.shapes:
            value = value_of(node)
            given[node] = torch.zeros([as_traced(size) for size in value.shape], dtype=value.dtype, device=value.device)
        result: Tensor = evaluate(self.nodes, given, self.result)
        return result


def _is_weight(node: fx.Node) -> bool:
    """Whether it is a weight of linear or convolution layers (such as those that turn a distance into a bias), not a table of positions."""
    return bool(node.users) and all(user.target in {*LINEARS, *CONVOLUTIONS} and user.args[1:2] == (node,) for user in node.users)


def as_seen(mask: Tensor, total: int, where: str) -> Seen:
    """Splits a boolean or additive mask that broadcasts to [.., T, T] into visibility and bias.

    Raises:
        UnsupportedError: see `MaskProbe.run`.
    """
    if any(size not in (1, total) for size in mask.shape[-2:]):
        raise UnsupportedError(
            f"{where}: its mask has shape {list(mask.shape)}; known are masks that broadcast to [batch, heads, {total}, {total}]"
        )
    added = None
    if mask.dtype != torch.bool:
        added = mask.double()
        mask = ~(added <= HIDES)
    mask = mask.expand(*mask.shape[:-2], total, total).reshape(-1, total, total)
    if not (mask == mask[:1]).all():
        other = int((mask != mask[:1]).flatten(1).any(1).nonzero()[0])
        raise UnsupportedError(
            f"{where}: its mask differs between heads or batch rows; known are masks that all heads share. Head 0 (query = line, "
            f"key = column):\n{draw(mask[0].numpy(force=True))}\nand head {other}:\n{draw(mask[other].numpy(force=True))}"
        )
    visible = np.asarray(mask[0].numpy(force=True))
    if added is None:
        return Seen(visible)
    bias = np.where(visible, added.expand(*added.shape[:-2], total, total).reshape(-1, total, total).numpy(force=True), 0.0)
    by_row = bias[:, np.arange(total), visible.argmax(axis=1)][:, :, None]  # a constant added to a row does not change its softmax
    return Seen(visible, bias if any(np.any(own - row, where=visible) for own, row in zip(bias, by_row, strict=True)) else None)
