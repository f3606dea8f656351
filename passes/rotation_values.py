"""What lies between projections and attention, compared on numbers with a rotary embedding.

The region between may hold sums, products and moves of elements only: it is a polynomial of its inputs, so that agreement on random
numbers proves it. Cosines and sines are taken as given there; that their columns repeat, where the op reads one of two, is seen on the
cosines and sines themselves at all kinds of positions. (RoPE: Su et al., 2021, https://arxiv.org/abs/2104.09864.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from paged_attn.passes.call_form import CallForm
from paged_attn.passes.cone import evaluate
from paged_attn.passes.graph_tools import as_traced, value_of
from paged_attn.passes.kv_heads import KVSource, rows_in
from paged_attn.passes.token_data import cone_of, shape_at, writers_of

Columns = Literal["all", "first half", "every second"]
COLUMNS: tuple[Columns, ...] = ("all", "first half", "every second")
_LENGTHS = (13, 29)
_TOLERANCE = 1e-6
_DENSE = 1024  # positions from 0 on at which columns are compared
_FARTHEST = (1 << 20, 1 << 17, 1 << 13, 1 << 11, 1 << 9, 1 << 7, 1 << 5)  # what a model with a table of positions has is less


class Turn(NamedTuple):
    """The first 2 * pairs elements of each head, turned by pairs (i, i + pairs) or, if interleaved, (2i, 2i + 1).

    cos and sin [.., T, .., n], all else of size 1; the pairs' angles are in these columns of n. One complex tensor is both of them.
    """

    cos: fx.Node
    sin: fx.Node
    columns: Columns
    pairs: int
    interleaved: bool


class RotationValues:
    """Evaluates parts of one graph, in float32 on the CPU.

    Args:
        values: the real tensor (or number) behind each placeholder.
        positions: the nodes that hold the batch's positions.
    """

    def __init__(self, graph: fx.Graph, form: CallForm, values: Mapping[fx.Node, Any], positions: frozenset[fx.Node]) -> None:
        self.form, self.values, self.positions = form, values, positions
        self.writers = writers_of(graph)
        self._repeats: dict[tuple[fx.Node, Columns], bool] = {}

    def turn(self, start: KVSource, end: fx.Node, user: fx.Node, roots: Mapping[fx.Node, Iterable[fx.Node]]) -> Turn | None:
        """How `end` [T, heads, dim], as `user` reads it, is `start` rotated by the roots; None if it is not.

        Args:
            roots: cosines and sines in any order, or one complex tensor of both, each with the nodes that stand for it in what makes `end`.
        """
        for columns in COLUMNS:
            found = self._turn_by(columns, start, end, user, roots)
            if found is not None and (columns == "all" or all(self._repeat(root, columns, user) for root in roots)):
                return found
        return None

    def _turn_by(
        self, columns: Columns, start: KVSource, end: fx.Node, user: fx.Node, roots: Mapping[fx.Node, Iterable[fx.Node]]
    ) -> Turn | None:
        tables = list(roots)
        first, last = tables[0], tables[-1]
        is_complex = value_of(first).dtype.is_complex
        width, dim = int(value_of(first).shape[-1]), int(value_of(start.base).shape[-1])
        pairs = width if columns == "all" else width // 2
        if 2 * pairs > dim or (columns != "all" and (width % 2 or is_complex)):
            return None
        candidates: set[Turn] | None = None
        for length in _LENGTHS:
            generator = torch.Generator().manual_seed(length)
            x, one, two = (
                torch.rand(shape, generator=generator) * 2 - 1
                for shape in (shape_at(value_of(start.base), self.form, length), (length, pairs), (length, pairs))
            )
            angles = (torch.complex(one, two),) if is_complex else (one, two)
            given = {
                node: _spread(angle, columns).reshape(shape_at(value_of(node), self.form, length))
                for nodes, angle in zip(roots.values(), angles, strict=True)
                for node in nodes
            }
            try:
                got = self._at(end, user, length, {start.base: x, **given}, owned=False)
            except (IndexError, RuntimeError, KeyError):  # KeyError: parameters, or more tokens than start's, are in it
                return None
            rows, matching = rows_in(x, start), set[Turn]()
            for cos, c, sin, s in ((first, one, last, two), (last, two, first, one))[: len(tables)]:
                for interleaved in (False, True) if pairs > 1 else (False,):
                    expected = rotated(rows, c, s, interleaved)
                    if got.shape == expected.shape and torch.allclose(got.float(), expected, rtol=0.0, atol=_TOLERANCE):
                        matching.add(Turn(cos, sin, columns, pairs, interleaved))
            candidates = matching if candidates is None else candidates & matching
        return candidates.pop() if candidates and len(candidates) == 1 else None

    def _repeat(self, root: fx.Node, columns: Columns, user: fx.Node) -> bool:
        """Whether the columns that are left out hold the others' numbers, at all positions that the model has."""
        if (root, columns) not in self._repeats:
            value = self._at_far_positions(root, user)
            self._repeats[root, columns] = value is not None and torch.equal(value, _spread(_taken(value, columns), columns))
        return self._repeats[root, columns]

    def _at_far_positions(self, root: fx.Node, user: fx.Node) -> Tensor | None:
        for farthest in _FARTHEST:
            near = torch.arange(min(_DENSE, farthest))
            positions = torch.cat([near, torch.linspace(0, farthest - 1, 2 * _DENSE).long()])
            count = len(positions)
            given = {node: positions.expand(shape_at(value_of(node), self.form, count)) for node in self.positions}
            try:
                value: Tensor = self._at(root, user, count, given, owned=True)
                return value.reshape(count, -1)
            except IndexError:
                continue
            except RuntimeError as error:
                if "index" not in str(error):  # a gather beyond its table
                    return None
            except KeyError:
                return None
        return None

    def _at(self, node: fx.Node, user: fx.Node, length: int, given: Mapping[fx.Node, Any], owned: bool) -> Any:
        """The node's value, as `user` reads it, in a call of `length` tokens; behind nodes that are `given` nothing is looked at.

        Raises:
            KeyError: it is made from other tokens, or from the model's tensors where they are not to be `owned`.
            IndexError, RuntimeError: it can not be computed for that length, or those positions.
        """
        nodes = cone_of(node, user, frozenset(given), self.writers)
        inside, known = set(nodes), dict(given)
        for each in nodes:
            role = self.form.roles.get(each)
            if role in ("tokens", "owned" if owned else "tokens") and each not in known:
                own = self.values[each]
                known[each] = length if role == "tokens" else own.detach().cpu() if isinstance(own, Tensor) else as_traced(own)
            for source in each.all_input_nodes if each not in known else ():
                if source not in inside:  # it lends its shape alone
                    value = value_of(source)
                    known[source] = torch.zeros(shape_at(value, self.form, length), dtype=_wide_on_cpu(each, value.dtype))
        return evaluate(nodes, known, node, _wide_on_cpu)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """What `rope_and_store_kv` computes of x [T, heads, dim] by cos and sin [T, pairs], all float32."""
    pairs = cos.shape[1]
    front, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    first, second = (front[..., ::2], front[..., 1::2]) if interleaved else (front[..., :pairs], front[..., pairs:])
    c, s = cos[:, None], sin[:, None]
    parts = [first * c - second * s, second * c + first * s]
    turned = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat([turned, rest], dim=-1)


def _spread(taken: Tensor, columns: Columns) -> Tensor:
    if columns == "all":
        return taken
    return torch.cat([taken, taken], dim=1) if columns == "first half" else taken.repeat_interleave(2, dim=1)


def _taken(rows: Tensor, columns: Columns) -> Tensor:
    return rows[:, : rows.shape[1] // 2] if columns == "first half" else rows[:, ::2]


def _wide_on_cpu(_: fx.Node, argument: Any) -> Any:
    """Half precision would round what is compared, and numbers of the CPU do not mix with a device's."""
    if isinstance(argument, torch.dtype) and argument.is_floating_point and argument.itemsize < 4:
        return torch.float32
    on_device = isinstance(argument, torch.device) or (isinstance(argument, str) and argument.startswith("cuda"))
    return torch.device("cpu") if on_device else argument
