"""Evaluates a value that a model computes from the number of tokens, constants and its own tensors, in calls of chosen lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import as_traced, depends_on, shape_at, size_at, value_of
from paged_attn.passes.fx.memory import Writers, writers_of
from paged_attn.passes.fx.slicing import ancestors, evaluate
from paged_attn.passes.fx.token_data import token_axis

LENGTHS = ((13, 29), (4, 7))  # the second for models with fewer positions
FARTHER = (1031, 131101)  # lengths of long calls, for numbers made from T that only matter there, such as max(1, T / 4096)
MOST_NUMBERS = 1 << 23  # elements of the largest tensor created for such a call


Results = dict[tuple[fx.Node, int], Any]  # values of nodes by (node, length of the call)


class Affine(NamedTuple):
    """Row i holds step * i + start."""

    step: int
    start: int


class RowProbe:
    """Values as the node `user` would read them.

    Args:
        writers: the graph's, if already known.
        unwritten: cache of results that are the same for every user, since nothing writes to them in place.
    """

    def __init__(
        self, form: CallForm, values: Values, user: fx.Node, writers: Writers | None = None, unwritten: Results | None = None
    ) -> None:
        self.form, self.values, self.user = form, values, user
        self.writers = writers_of(user.graph.nodes) if writers is None else writers
        self._unwritten = {} if unwritten is None else unwritten
        self._seen: Results = {}

    def at(self, node: fx.Node, length: int, given: Mapping[fx.Node, Any] | None = None) -> Any:
        """The node's value in a call of `length` tokens; nodes in `given` are not followed further.

        Raises:
            KeyError: it depends on the tokens.
            IndexError, RuntimeError: the model cannot run a call of that length.
        """
        if given is not None:
            return self._evaluate(node, length, given)
        key = (node, length)
        if key in self._unwritten:
            return self._unwritten[key]
        if key not in self._seen:
            self._seen[key] = self._evaluate(node, length, {})
            if not any(other in self.writers for other in ancestors(node, self.user, writers=self.writers, through_shapes=False)):
                self._unwritten[key] = self._seen[key]
        return self._seen[key]

    def _evaluate(self, node: fx.Node, length: int, given: Mapping[fx.Node, Any]) -> Any:
        nodes = ancestors(node, self.user, frozenset(given), self.writers, through_shapes=False)
        known = dict(given)
        inside = set(nodes)
        for each in nodes:
            role = self.form.roles.get(each)
            if role in ("tokens", "owned") and each not in known:
                known[each] = length if role == "tokens" else as_traced(self.values[each])
            for source in each.all_input_nodes if each not in known else ():
                if source not in inside:  # only its shape is read
                    value = value_of(source)
                    known[source] = torch.zeros(shape_at(value, self.form.num_tokens, length), dtype=value.dtype, device=value.device)
        return evaluate(nodes, known, node)

    def lengths(self, node: fx.Node) -> tuple[int, int]:
        """Two lengths at which the model can run.

        Raises:
            IndexError, RuntimeError: there are no such lengths.
        """
        longest = self.form.max_tokens or LENGTHS[0][1]
        for short, long in LENGTHS:
            long = max(min(long, longest), 2)
            short = min(short, long - 1)
            try:
                self.at(node, short), self.at(node, long)
            except (IndexError, RuntimeError):
                if (short, long) == LENGTHS[-1] or longest <= LENGTHS[-1][1]:
                    raise
                continue
            return short, long
        raise RuntimeError("no two lengths could be tried")

    def farther(self, node: fx.Node, longest: int | None) -> list[int]:
        """Lengths of long calls, limited by the model's positions and the size of tensors."""
        nodes = ancestors(node, self.user, writers=self.writers, through_shapes=False)
        shapes = [value.shape for each in nodes if isinstance(value := value_of(each), Tensor) and each.op != "placeholder"]
        most = min(limit for limit in (self.form.max_tokens, longest, FARTHER[-1]) if limit is not None)

        def numbers(length: int) -> int:
            return max((math.prod(size_at(size, self.form.num_tokens, length) for size in shape) for shape in shapes), default=0)

        while most > FARTHER[0] and numbers(most) > MOST_NUMBERS:
            most //= 2
        return sorted({min(length, most) for length in FARTHER})

    def is_constant(self, node: fx.Node) -> bool:
        """Whether all rows are equal, and the same at both lengths. Raises as `lengths`."""
        lengths = self.lengths(node)
        one, two = (self.at(node, length) for length in lengths)
        if not isinstance(one, Tensor):
            return type(one) is type(two) and bool(one == two)
        for axis, size in enumerate(value_of(node).shape):
            # max(T, 77) rows are as many at both lengths, and still rows; the one chunk of both calls is none.
            of_tokens = depends_on(size, self.form.num_tokens) and one.shape[axis] >= max(lengths)
            if of_tokens or one.shape[axis] != two.shape[axis]:
                one, two = _collapsed(one, axis), _collapsed(two, axis)
                if one is None or two is None:
                    return False
        return bool(((one == two) | ((one != one) & (two != two))).all())

    def affine(self, node: fx.Node, given: Mapping[fx.Node, Any] | None = None) -> Affine | None:
        """How a tensor counts rows along its one dimension T, equally at both lengths; None if it does not. Raises as `lengths`.

        `given`: integers in place of the tensors that it is made from, whatever their dtype.
        """
        axis = token_axis(node, self.form)
        if axis is None or (given is None and value_of(node).dtype == torch.bool):
            return None
        return self.affine_along(node, axis, given)

    def affine_along(self, node: fx.Node, axis: int, given: Mapping[fx.Node, Any] | None = None) -> Affine | None:
        """`affine` along any dimension, which may have more rows than tokens. Raises as `lengths`."""
        found = {_affine(self.at(node, length, given), axis) for length in self.lengths(node)}
        return found.pop() if len(found) == 1 else None


def _collapsed(value: Tensor, axis: int) -> Tensor | None:
    """The first row if all rows equal it (NaN equals NaN), else None."""
    row = value.narrow(axis, 0, 1)
    return row if bool(((value == row) | ((value != value) & (row != row))).all()) else None


def _affine(value: Tensor, axis: int) -> Affine | None:
    rows = value.movedim(axis, -1).reshape(-1, value.shape[axis])
    if len(rows) == 0 or rows.shape[1] < 2 or rows.is_complex() or not bool((rows == rows[:1]).all()):
        return None
    line = rows[0].double()
    start, step = float(line[0]), float(line[1] - line[0])
    exact = start.is_integer() and step.is_integer() and step != 0
    count = torch.arange(len(line), device=line.device, dtype=torch.float64)
    return Affine(int(step), int(start)) if exact and bool((line == step * count + start).all()) else None
