"""Two neighbouring parts of a product that go through the same operations, as q and k through their rotation, go through them as one part.

Before: rotate(narrow(qkv, -1, 0, q)), rotate(narrow(qkv, -1, q, k)): a kernel each
After:  both = rotate(narrow(qkv, -1, 0, q + k)); as_strided(both, ..), as_strided(both, ..): one kernel
Left alone: parts that meet different values on their way, such as the weights of a norm of q and of one of k; parts that are used before
the other is complete; results that a view or a foreign op needs dense; and whatever does not give the same numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor, fx

from paged_attn.passes.fx.graph_tools import call_of_value, keep_name, op_name, shape_at, shape_of, sizes_of, symbol, value_of
from paged_attn.passes.fx.memory import bases_of, is_written, remove_dead_code, writes_in_place
from paged_attn.passes.fx.row_layout import MISFITS, with_tokens
from paged_attn.passes.fx.slicing import evaluate_all, kind_of
from paged_attn.passes.optimize.linears.sliced_values import SlicedValues
from paged_attn.passes.optimize.row_region import is_moving

_TOKENS = 3  # of a probe


class _Part(NamedTuple):
    """Columns of a product, taken by torch.narrow."""

    node: fx.Node
    source: fx.Node
    start: int
    length: int


class _Twins(NamedTuple):
    """Two parts, and what is made of each, step by step; `pairs` in the first's graph order, the last of which holds both results.

    `repeated`: nodes that the second's read -> those of the first's with the same value.
    """

    first: _Part
    second: _Part
    pairs: dict[fx.Node, fx.Node]
    repeated: dict[fx.Node, fx.Node]

    @property
    def results(self) -> tuple[fx.Node, fx.Node]:
        return list(self.pairs.items())[-1]


def merge_rotations(graph: fx.Graph) -> int:
    """Rewrites in place; returns how many pairs became one."""
    parts = [part for node in graph.find_nodes(op="call_function", target=torch.narrow) if (part := _part(node)) is not None]
    merged, sliced, known = set[fx.Node](), SlicedValues(), dict[Hashable, _Traced | None]()
    for first in parts:
        for second in parts:
            adjoin = second.source is first.source and second.start == first.start + first.length
            if not adjoin or not merged.isdisjoint((first.node, second.node)):
                continue
            twins = _twins(first, second)
            if twins is not None and _merge(graph, twins, sliced, known):
                merged |= {first.node, second.node}
    if merged:
        remove_dead_code(graph)
    return len(merged) // 2


def _part(node: fx.Node) -> _Part | None:
    source, dim, start, length = (*node.args, None, None, None, None)[:4]
    if not isinstance(source, fx.Node) or dim != -1 or not isinstance(start, int) or not isinstance(length, int):
        return None
    return _Part(node, source, start, length)


def _twins(first: _Part, second: _Part) -> _Twins | None:
    """What both go through alike, up to one pair of results; None if they part before anything was computed, or in several nodes."""
    pairs, pending, repeated = {first.node: second.node}, [first.node], dict[fx.Node, fx.Node]()
    while pending:
        node = pending.pop(0)
        for user in node.users:
            if user in pairs:
                continue
            # A node that joins two, such as cat, is met again behind the last of its operands.
            twin = next((each for each in pairs[node].users if each not in pairs.values() and _alike(user, each, pairs, repeated)), None)
            if twin is not None:
                pairs[user] = twin
                pending.append(user)
    one, other = max(pairs), max(pairs.values())
    inner = [(node, pairs) for node in pairs if node is not one] + [(node, pairs.values()) for node in pairs.values() if node is not other]
    if pairs[one] is not other or any(user not in known for node, known in inner for user in node.users):
        return None
    last = max(one, other)
    # In what may be the product's own memory (a cast to the dtype that it has) nothing is computed, and writes to it reach the product.
    unchanged = all(is_moving(node) for node in pairs) or first.source in bases_of([one])
    if unchanged or any(user < last for user in (*one.users, *other.users)):
        return None
    read = {each for node in (*pairs, *pairs.values()) for each in node.all_input_nodes}
    if is_written({*read, *pairs, *pairs.values()}, min(first.node, second.node), last):
        return None
    return _Twins(first, second, {node: pairs[node] for node in sorted(pairs)}, repeated)


def _alike(one: fx.Node, other: fx.Node, pairs: Mapping[fx.Node, fx.Node], repeated: dict[fx.Node, fx.Node]) -> bool:
    """Whether two nodes call the same with what corresponds to each other; what the second reads of values that were computed twice is
    noted in `repeated`."""
    if one.op not in ("call_function", "call_method") or (one.op, one.target) != (other.op, other.target) or writes_in_place(one):
        return False
    if not isinstance(value_of(one), (Tensor, tuple, list)):
        return False
    if op_name(one) in ("view", "reshape"):  # with a number of heads, maybe
        return _same(_without_sizes(one), _without_sizes(other), pairs, repeated)
    return _same((one.args, one.kwargs), (other.args, other.kwargs), pairs, repeated)


def _without_sizes(node: fx.Node) -> Any:
    return fx.node.map_aggregate((node.args, node.kwargs), lambda each: "a size" if type(each) is int else each)


def _same(one: Any, other: Any, pairs: Mapping[fx.Node, fx.Node], repeated: dict[fx.Node, fx.Node]) -> bool:
    if isinstance(one, fx.Node):
        if pairs.get(one, one) is other:
            return True
        # cos[..., :32] may be taken for each of the two.
        twice = isinstance(other, fx.Node) and one not in pairs and is_moving(one) and _alike(one, other, {}, repeated)
        if twice:
            repeated[other] = one
        return twice
    if isinstance(one, slice):
        one, other = ((each.start, each.stop, each.step) if isinstance(each, slice) else each for each in (one, other))
    if isinstance(one, Mapping):
        named = isinstance(other, Mapping) and one.keys() == other.keys()
        return named and all(_same(one[name], other[name], pairs, repeated) for name in one)
    if isinstance(one, (tuple, list)):
        alike = isinstance(other, (tuple, list)) and len(one) == len(other)
        return alike and all(_same(a, b, pairs, repeated) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)


def _of_both(one: Any, other: Any) -> Any:
    """An argument for both parts at once: a size that differs is that of both together."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return type(one)(_of_both(a, b) for a, b in zip(one, other, strict=True))
    return one + other if isinstance(one, int) and isinstance(other, int) and one != other else one


class _Traced(NamedTuple):
    """Traced values that layers share: of merged nodes and two more that bring tokens in front; of what takes the results' places."""

    merged: list[Any]
    columns: list[Tensor]


def _merge(graph: fx.Graph, twins: _Twins, sliced: SlicedValues, known: dict[Hashable, _Traced | None]) -> bool:
    """False, and nothing is changed, if their operations do not take both parts at once, or what reads a result needs it dense.

    Args:
        known: what was proved of other layers.
    """
    first, width = twins.first, twins.first.length + twins.second.length
    place, copies = max(twins.results), dict[fx.Node, fx.Node]()
    for node, twin in twins.pairs.items():
        with graph.inserting_after(place):
            if node is first.node:
                place = graph.call_function(torch.narrow, (first.source, -1, first.start, width))
            else:
                arguments = fx.map_arg(_of_both(node.args, twin.args), lambda each: copies.get(each, each))
                keywords = fx.map_arg(dict(node.kwargs), lambda each: copies.get(each, each))
                place = graph.create_node(node.op, node.target, arguments, keywords)
        copies[node] = place
    made = list(copies.values())
    kind = (kind_of([*twins.pairs, *twins.pairs.values()]), repr([sizes_of(node) for node in twins.results]))
    if kind not in known:
        known[kind] = _proved(twins, made, width)
    traced = known[kind]
    if traced is None or not all(sliced.takes(old, column) for old, column in zip(twins.results, traced.columns, strict=True)):
        for node in reversed(made):
            graph.erase_node(node)
        return False
    axis = _joined(traced.merged[len(made) - 1], *twins.results)
    for target, arguments in ((torch.movedim, (axis, -2)), ("contiguous", ())):
        with graph.inserting_after(place):
            place = call_of_value(graph, None, target, place, *arguments)
        made.append(place)
    for node, value in zip(made, traced.merged, strict=True):
        node.meta["example_value"] = value
    base = place
    for old, column in zip(twins.results, traced.columns, strict=True):
        place = _strided(graph, base, place, column)
        keep_name(place, old)
        for view, value in sliced.of_views(old, column).items():
            view.meta["example_value"] = value
        old.replace_all_uses_with(place)
    return True


def _proved(twins: _Twins, merged: list[fx.Node], width: int) -> _Traced | None:
    """None unless the result of the merged nodes is both results, bit for bit, on random numbers, in one dim."""
    inside = {*twins.pairs, *twins.pairs.values()}
    outside = {each for node in inside for each in node.all_input_nodes} - inside - {twins.first.source, *twins.repeated}
    part = value_of(twins.first.node)
    try:
        given = {node: value_of(node) for node in outside} | {merged[0]: part.new_empty((*part.shape[:-1], width))}
        values = evaluate_all(merged, given)
    except MISFITS:
        return None
    axis = _joined(values[merged[-1]], *twins.results)
    if axis is None or not _gives_the_same(twins, merged, outside, width, axis):
        return None
    turned = values[merged[-1]].movedim(axis, -2)
    columns = _columns(base := turned.contiguous(), twins.results, axis)
    return None if columns is None else _Traced([*(values[node] for node in merged), turned, base], columns)


def _columns(base: Tensor, results: tuple[fx.Node, fx.Node], axis: int) -> list[Tensor] | None:
    """What takes the place of both results: views of `base` by strides; of any other view that leaves a piece, Inductor makes a copy, in a
    kernel of its own. None if the strides depend on T."""
    columns, begin = list[Tensor](), 0
    for old in results:
        size = shape_of(old)[axis]
        view = base.narrow(-2, begin, size).movedim(-2, axis)
        strides = [1 if isinstance(size, int) and size == 1 else stride for size, stride in zip(view.shape, view.stride(), strict=True)]
        if any(isinstance(stride, SymInt) for stride in strides):
            return None
        columns.append(base.as_strided(view.shape, strides, int(view.storage_offset())))
        begin += size
    return columns


def _strided(graph: fx.Graph, base: fx.Node, after: fx.Node, column: Tensor) -> fx.Node:
    sizes: list[Any] = list(column.shape)
    for dim, size in enumerate(sizes):
        if isinstance(size, SymInt):
            with graph.inserting_after(after):
                axis = [symbol(each) for each in shape_of(base)].index(symbol(size))
                after = sizes[dim] = call_of_value(graph, size, torch.ops.aten.sym_size.int, base, axis)
    with graph.inserting_after(after):
        return call_of_value(graph, column, torch.as_strided, base, sizes, list(column.stride()), int(column.storage_offset()))


def _joined(result: Any, first: fx.Node, second: fx.Node) -> int | None:
    """The one dim, of [.., T, .., D] but not D, in which the result is as long as both, while all others are alike; None if there is
    none."""
    if not isinstance(result, Tensor) or not isinstance(value_of(first), Tensor):
        return None
    sizes = [[symbol(size) for size in each] for each in (result.shape, shape_of(first), shape_of(second))]
    if len({len(each) for each in sizes}) != 1:
        return None
    counts = [isinstance(size, int) for size in sizes[0]]
    differ = [axis for axis, (both, one, other) in enumerate(zip(*sizes, strict=True)) if not both == one == other]
    if len(differ) != 1 or counts.count(False) != 1 or not counts[-1] or not all(isinstance(each[differ[0]], int) for each in sizes):
        return None
    both, one, other = (each[differ[0]] for each in sizes)
    return differ[0] if both == one + other and differ[0] != len(counts) - 1 else None


def _gives_the_same(twins: _Twins, merged: list[fx.Node], outside: set[fx.Node], width: int, axis: int) -> bool:
    numbers = torch.Generator().manual_seed(0)
    symbols = {each for node in (*outside, twins.first.node) for size in _sizes(node) for each in getattr(symbol(size), "free_symbols", ())}
    if len(symbols) > 1:
        return False
    tokens = next(iter(symbols), None)

    def random(shape: list[int], like: Tensor) -> Tensor:
        return torch.randn(shape, generator=numbers).to(like.device, like.dtype)

    given: dict[fx.Node, Any] = {}
    for node in outside:
        value = value_of(node)
        given[node] = random(shape_at(node, tokens, _TOKENS), value) if isinstance(value, Tensor) else with_tokens(value, tokens, _TOKENS)
    given |= {node: given[same] for node, same in twins.repeated.items() if same in given}
    part, length = value_of(twins.first.node), twins.first.length
    both = random([*shape_at(twins.first.node, tokens, _TOKENS)[:-1], width], part)
    try:
        together = evaluate_all(merged, given | {merged[0]: both})[merged[-1]]
        one = evaluate_all([*twins.pairs], given | {twins.first.node: both[..., :length]})[twins.results[0]]
        other = evaluate_all([*sorted(twins.pairs.values())], given | {twins.second.node: both[..., length:]})[twins.results[1]]
    except MISFITS:
        return False
    return torch.equal(together, torch.cat((one, other), axis))


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    value = value_of(node)
    return sizes_of(node) if isinstance(value, Tensor) else (value,) if isinstance(value, SymInt) else ()
