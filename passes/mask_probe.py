"""Evaluating a mask's subgraph on small concrete inputs, with large literals scaled down so that they show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.passes.call_form import CallForm, CallNotPaged
from paged_attn.passes.cone import MAX_NODES, ancestors, evaluate
from paged_attn.passes.graph_tools import as_traced
from paged_attn.passes.mask_family import BoolMatrix, draw
from paged_attn.passes.mask_numbers import hidden_numbers, scaled_number, scaled_numbers

SMALLEST_TABLE = 83  # the longest probe
# Two ways to scale the large literals (a 4,096 window, an 8,192 chunk) down: what a mask does must follow both.
SCALES: tuple[tuple[int, ...], ...] = ((7, 13, 18, 23), (10, 16, 21, 27))


class MaskProbe:
    """The subgraph behind one mask, ready to be evaluated for a row of packed sequences.

    Args:
        mask: the node given to an attention as its mask.
        user: that attention; until it, the mask may be written in place.
        values: the real tensor (or number) behind each placeholder.
    """

    def __init__(self, mask: fx.Node, user: fx.Node, form: CallForm, values: dict[fx.Node, Any], where: str) -> None:
        self.mask, self.form, self.values, self.where = mask, form, values, where
        self.nodes = ancestors(mask, user)
        if len(self.nodes) > MAX_NODES:
            raise UnsupportedError(
                f"{where}: its mask is made by {len(self.nodes)} operations, more than the {MAX_NODES} that are evaluated"
            )
        for node in self.nodes:
            role = form.roles.get(node, "")
            if role.startswith("call:"):
                raise CallNotPaged(f"the mask of {where} is made from {role.removeprefix('call:')}, which belongs to this call")
        self.literals = scaled_numbers(self.nodes)
        owned = {n: values[n] for n in self.nodes if form.roles.get(n) == "owned"}
        self.hidden = hidden_numbers(self.nodes, owned)
        # A mask that is read from a stored table (or multiplies weights) shows itself only over that table's length.
        self.table_length = max((min(v.shape[-1], 4096) for v in owned.values() if v.dim() >= 2 and v.shape[-1] == v.shape[-2]), default=0)
        if 0 < self.table_length < SMALLEST_TABLE:
            raise UnsupportedError(
                f"{where}: its mask is read from a table of {self.table_length} positions; a proof needs {SMALLEST_TABLE}"
            )

    def images(self, scale: Sequence[int]) -> dict[int, int]:
        """What each large literal becomes under a scale; literals within 2 of each other keep their difference."""
        images: dict[int, int] = {}
        base, slot = None, -1
        for literal in self.literals:
            if base is None or literal - base > 2:
                base, slot = literal, slot + 1
                if slot >= len(scale):
                    raise UnsupportedError(
                        f"{self.where}: its mask uses {len(self.literals)} large numbers {self.literals}; "
                        f"at most {len(scale)} can be probed"
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
            image = images.get(scaled_number(node, value))  # type: ignore[arg-type]
            return value if image is None else type(value)(image if value > 0 else -image)

        return as_visibility(evaluate(self.nodes, given, self.mask, constant), total, self.where)

    def evaluate_as_called(self) -> Tensor:
        """The mask of the very call that was traced, on its own inputs."""
        given = {node: as_traced(self.values[node]) for node in self.nodes if node.op == "placeholder"}
        result: Tensor = evaluate(self.nodes, given, self.mask)
        return result

    def _given(self, node: fx.Node, lengths: Sequence[int], generator: torch.Generator) -> Any:
        role, total, value = self.form.roles[node], sum(lengths), self.values[node]
        if role == "tokens":
            return total
        if role == "position_ids":
            return torch.cat([torch.arange(n) for n in lengths])[None].to(value.device, value.dtype)
        if role == "input_ids":
            return torch.randint(0, 16, (1, total), generator=generator).to(value.device, value.dtype)
        return value


def as_visibility(mask: Tensor, total: int, where: str) -> BoolMatrix:
    """A boolean or additive mask broadcast to [B, H, T, T] as one [T, T] of what is visible.

    Raises:
        UnsupportedError: see `MaskProbe.run`.
    """
    if mask.dim() > 4 or any(size not in (1, total) for size in mask.shape[-2:]):
        raise UnsupportedError(
            f"{where}: its mask has shape {list(mask.shape)}; known are masks that broadcast to [batch, heads, {total}, {total}]"
        )
    if mask.dtype != torch.bool:
        finite = mask.float()
        hidden = finite <= -1e4
        if not ((finite == 0) | hidden).all():
            raise UnsupportedError(
                f"{where}: its additive mask holds values besides 0 and -inf (from {finite[~hidden].min():g} to "
                f"{finite[~hidden].max():g}): a bias that no rule of paged_attn recognises yet. "
                f"What it leaves visible (query = line, key = column):\n{_drawn(~hidden, total)}"
            )
        mask = ~hidden
    mask = mask.expand(*mask.shape[:-2], total, total).reshape(-1, total, total)
    if not (mask == mask[:1]).all():
        other = int((mask != mask[:1]).flatten(1).any(1).nonzero()[0])
        raise UnsupportedError(
            f"{where}: its mask differs between heads or batch rows; known are masks that all heads share. Head 0 (query = line, "
            f"key = column):\n{_drawn(mask[0], total)}\nand head {other}:\n{_drawn(mask[other], total)}"
        )
    return np.asarray(mask[0].cpu().numpy())


def _drawn(visible: Tensor, total: int) -> str:
    return draw(visible.expand(*visible.shape[:-2], total, total).reshape(-1, total, total)[0].cpu().numpy())
