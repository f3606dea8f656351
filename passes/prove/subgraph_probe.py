"""Evaluates a part of a graph on small concrete inputs, with large literals scaled down so that they matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.model_code import model_code
from paged_attn.passes.fx.call_form import CallForm, CallNotPaged, Values
from paged_attn.passes.fx.graph_tools import op_name, value_of
from paged_attn.passes.fx.mask_literals import LARGEST_SHOWN, hidden_numbers, is_size, scaled_number, scaled_numbers
from paged_attn.passes.fx.slicing import MAX_NODES, evaluate
from paged_attn.passes.prove.score_subgraph import (
    factors_of_scores,
    needed_for_values,
    placeholder_value,
    refuse_hidden_states,
    without_score_arithmetic,
    zeros_for,
)

LIMITS = ((97, 127, 149, 173), (101, 131, 151, 179))  # scales that keep every literal longer than the probes: for tables, not windows
# Two ways to scale the large literals (a 4,096 window, an 8,192 chunk) down: what a mask does must follow both.
SCALES: tuple[tuple[int, ...], ...] = ((7, 13, 18, 23), (10, 16, 21, 27))


class ProbeFailed(UnsupportedError):
    """A mask's operations fail on a probe: one of its tables is too short."""


class SubgraphProbe:
    """The subgraph that computes a value, ready to be evaluated for a row of packed sequences.

    Args:
        result: the value.
        user: where it is used; until then its inputs may be written in place.
        stops: nodes that are given to each evaluation, and not followed further.
        products: those stops that are q.k: plain arithmetic on them is proved elsewhere, and does not involve positions.
    """

    def __init__(
        self, result: fx.Node, user: fx.Node, form: CallForm, values: Values, where: str, *,
        stops: Sequence[fx.Node] = (), products: Sequence[fx.Node] = (),
    ) -> None:  # fmt: skip
        self.result, self.form, self.values, self.where, self.stops = result, form, values, where, tuple(stops)
        self.scales = SCALES
        self.nodes, self.shapes = needed_for_values(result, user, self.stops)
        for node in self.nodes:
            role = form.roles.get(node, "")
            if role.startswith("call:"):
                raise CallNotPaged(f"the mask of {where} is made from {role.removeprefix('call:')}, which belongs to this call")
        refuse_hidden_states([node for node in self.nodes if node not in self.shapes], form, where)
        if len(self.nodes) > MAX_NODES:
            raise UnsupportedError(
                f"{where}: its mask is made by {len(self.nodes)} operations, more than the {MAX_NODES} that are evaluated"
            )
        factors = factors_of_scores(self.nodes, products, form) if products else set()
        self._about_positions = [node for node in without_score_arithmetic(self.nodes, products) if node not in factors]
        self.literals = scaled_numbers(self._about_positions)
        self.owned = {n: values[n] for n in self.nodes if form.roles.get(n) == "owned" and n not in factors}

    def hidden(self, shown: int = LARGEST_SHOWN) -> list[str]:
        """The large numbers that no probe can show; see `hidden_numbers`."""
        return hidden_numbers(self._about_positions, self.owned, shown)

    def ends_of_stored(self) -> set[int]:
        """Literals that are only added to the number of tokens and equal a stored tensor's length: `bias[:, :, :, 2048 - T :]`."""
        added = {node for node in self._about_positions if isinstance(value_of(node), torch.SymInt) and op_name(node) in ("add", "sub")}
        others = scaled_numbers([node for node in self._about_positions if node not in added])
        lengths = {size for value in self.owned.values() for size in value.shape}
        return (lengths & set(self.literals)) - set(others)

    def images(self, scale: Sequence[int]) -> dict[int, int]:
        """The scaled value of each large literal; literals within 2 of each other keep their difference."""
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

    def unscaled(self, first: int, second: int) -> int | None:
        """The model's number that the probes at the two scales saw as `first` and `second`: a small number, or a large literal (plus or
        minus one); None if there is no such number."""
        if first == second:
            return first
        one, other = (self.images(scale) for scale in self.scales)
        fits = {literal + d for literal in self.literals for d in (-1, 0, 1) if (one[literal] + d, other[literal] + d) == (first, second)}
        return fits.pop() if len(fits) == 1 else None

    def evaluate(self, lengths: Sequence[int], scale: Sequence[int] | None, seed: int, given: Mapping[fx.Node, Tensor]) -> Tensor:
        """The value for a row of sequences of these lengths; `given`: values of the stops; with `scale` None, literals are unchanged.

        Raises:
            ProbeFailed: its operations do not run on such a row.
        """
        total = sum(lengths)
        images = self.images(scale) if scale is not None else {}
        ids = torch.randint(0, 16, (total,), generator=torch.Generator().manual_seed(seed))
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        known: dict[fx.Node, Any] = {n: placeholder_value(self.form.roles[n], self.values[n], lengths, ids) for n in inputs}
        known.update({node: zeros_for(node, self.form, total) for node in self.shapes})
        known.update(given)

        def constant(node: fx.Node, value: Any) -> Any:
            image = images.get(scaled_number(node, value))  # type: ignore[arg-type]
            if image is None and self.scales is LIMITS and is_size(node) and type(value) is int:
                # A table's shape has its number of entries: arange(-255, 1) has 256.
                near = (value - d for d in (0, 1, -1, 2, -2) if value - d in images)
                image = next((images[literal] + value - literal for literal in near), None)
            return value if image is None else type(value)(image if value > 0 else -image)

        with model_code(lambda why: ProbeFailed(f"{self.where}: its mask cannot be made for {total} tokens: {why}")):
            result: Tensor = evaluate(self.nodes, known, self.result, constant)
        return result
