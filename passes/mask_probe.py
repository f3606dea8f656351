"""Evaluating a mask's subgraph on small concrete inputs, with large literals scaled down so that they show."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.call_form import CallForm, CallNotPaged
from paged_attn.passes.cone import MAX_NODES, ancestors, evaluate
from paged_attn.passes.mask_family import BoolMatrix

LARGEST_SHOWN = 20  # a literal up to this size shows on the probes as it is
# Two ways to scale the large literals (a 4,096 window, an 8,192 chunk) down: what a mask does must follow both.
SCALES: tuple[tuple[int, ...], ...] = ((7, 13, 18, 23), (10, 16, 21, 27))
_SCALED = {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.lt, operator.le, operator.gt,
           operator.ge, operator.eq, operator.ne, torch.add, torch.sub, torch.mul, torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne,
           torch.floor_divide, torch.div, torch.remainder, torch.tril, torch.triu, torch.clamp, torch.where}  # fmt: skip
_SCALED_METHODS = {"add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne", "floor_divide", "div", "remainder", "tril", "triu", "clamp", "where",
                   "__floordiv__", "__mod__", "masked_fill", "fill_diagonal_"}  # fmt: skip


class MaskProbe:
    """The subgraph behind one mask, ready to be evaluated for a row of packed sequences.

    Args:
        mask: the node given to an attention as its mask.
        values: the real tensor (or number) behind each placeholder.
    """

    def __init__(self, mask: fx.Node, form: CallForm, values: dict[fx.Node, Any], where: str) -> None:
        self.mask, self.form, self.values, self.where = mask, form, values, where
        self.nodes = ancestors(mask)
        if len(self.nodes) > MAX_NODES:
            raise UnsupportedError(
                f"{where}: its mask is made by {len(self.nodes)} operations, more than the {MAX_NODES} that are evaluated"
            )
        for node in self.nodes:
            role = form.roles.get(node, "")
            if role.startswith("call:"):
                raise CallNotPaged(f"the mask of {where} is made from {role.removeprefix('call:')}, which belongs to this call")
        self.literals = self._large_literals()
        owned = [values[n] for n in self.nodes if form.roles.get(n) == "owned"]
        # A mask that is read from a stored table (or multiplies weights) shows itself only over that table's length.
        self.table_length = max((min(v.shape[-1], 4096) for v in owned if v.dim() >= 2 and v.shape[-1] == v.shape[-2]), default=0)

    def images(self, scale: Sequence[int]) -> dict[int, int]:
        """What each large literal becomes under a scale; literals within 2 of each other keep their difference."""
        images: dict[int, int] = {}
        base, slot = None, -1
        for literal in self.literals:
            if base is None or literal - base > 2:
                base, slot = literal, slot + 1
                if slot >= len(scale):
                    raise UnsupportedError(
                        f"{self.where}: its mask uses {len(self.literals)} large numbers {self.literals}; at most {len(scale)} can be probed"
                    )
            images[literal] = scale[slot] + literal - base
        return images

    def run(self, lengths: Sequence[int], scale: Sequence[int] | None, seed: int) -> BoolMatrix:
        """[T, T] bool on a row of sequences of these lengths; `scale` None leaves literals as they are.

        Raises:
            UnsupportedError: the mask has values between visible and hidden, differs by head, or is not [.., T, T].
        """
        total = sum(lengths)
        images = self.images(scale) if scale is not None else {}
        generator = torch.Generator().manual_seed(seed)
        given = {node: self._given(node, lengths, generator) for node in self.nodes if node.op == "placeholder"}

        def constant(node: fx.Node, value: Any) -> Any:
            if type(value) is int and abs(value) in images and _is_scaled(node):
                return images[abs(value)] if value > 0 else -images[abs(value)]
            return value

        return as_visibility(evaluate(self.nodes, given, self.mask, constant), total, self.where)

    def evaluate_as_called(self) -> Tensor:
        """The mask of the very call that was traced, on its own inputs."""
        given = {node: self.values[node] for node in self.nodes if node.op == "placeholder"}
        result: Tensor = evaluate(self.nodes, given, self.mask)
        return result

    def called_length(self) -> int:
        """The number of tokens of the call that was traced."""
        tokens = self.form.num_tokens
        return int(next((self.values[n] for n, role in self.form.roles.items() if role == "tokens"), tokens))

    def _given(self, node: fx.Node, lengths: Sequence[int], generator: torch.Generator) -> Any:
        role, total, value = self.form.roles[node], sum(lengths), self.values[node]
        if role == "tokens":
            return total
        if role == "position_ids":
            return torch.cat([torch.arange(n) for n in lengths])[None].to(value.device, value.dtype)
        if role == "input_ids":
            return torch.randint(0, 16, (1, total), generator=generator).to(value.device, value.dtype)
        return value

    def _large_literals(self) -> list[int]:
        found = {abs(value) for node in self.nodes if _is_scaled(node) for value in (*node.args, *node.kwargs.values())
                 if type(value) is int and LARGEST_SHOWN < abs(value) < 1 << 40}  # fmt: skip
        return sorted(found)


def _is_scaled(node: fx.Node) -> bool:
    return (node.op == "call_function" and node.target in _SCALED) or (node.op == "call_method" and node.target in _SCALED_METHODS)


def as_visibility(mask: Tensor, total: int, where: str) -> BoolMatrix:
    """A boolean or additive mask broadcast to [B, H, T, T] as one [T, T] of what is visible.

    Raises:
        UnsupportedError: see `MaskProbe.run`.
    """
    if mask.dtype != torch.bool:
        finite = mask.float()
        hidden = finite <= -1e4
        if not ((finite == 0) | hidden).all():
            raise UnsupportedError(
                f"{where}: its additive mask holds values besides 0 and -inf (from {finite[~hidden].min():g} to {finite[~hidden].max():g}): a bias "
                "that no rule of paged_attn recognises yet"
            )
        mask = ~hidden
    if mask.dim() > 4 or any(size not in (1, total) for size in mask.shape[-2:]):
        raise UnsupportedError(
            f"{where}: its mask has shape {list(mask.shape)}; known are masks that broadcast to [batch, heads, {total}, {total}]"
        )
    mask = mask.expand(*mask.shape[:-2], total, total).reshape(-1, total, total)
    if not (mask == mask[:1]).all():
        raise UnsupportedError(f"{where}: its mask differs between heads or batch rows; known are masks that all heads share")
    return np.asarray(mask[0].cpu().numpy())
