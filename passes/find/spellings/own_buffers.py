"""Takes keys and values directly that a module writes into a buffer of its own and reads back.

Before: cache[:1, 0:T] = k, or cache.narrow(1, 0, T).copy_(k); keys = cache[:1, :T], as reference code of Llama and DeepSeek has it;
        also cache[:, arange(T)] = k, cache[:, position_ids[0]] = k, cache.index_copy_(1, arange(T), k)
After:  keys = k; the buffer is neither written nor read, so that its size is no limit for a step of many requests. What is written at a
        call's tokens and never read is left out, too
Leaves alone: buffers that are read as a whole, before they are written, or in other parts than those that were written last.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from paged_attn.passes.fx.call_form import CallForm
from paged_attn.passes.fx.graph_tools import argument_of, arguments_of, call_with_value, name_of, shape_of, sizes_of, symbol, value_of
from paged_attn.passes.fx.memory import is_written, storages_of, writers_of

_OTHER = object()
_SHOWN = ("getitem", "squeeze", "view", "reshape", "flatten", "to", "long")
_Part = tuple[tuple[Any, Any], ...]  # (first, behind the last) in each dim


@dataclass
class _Uses:
    """All that is done with one buffer.

    Attributes:
        nodes: everything that can go when nothing reads the buffer.
        writes: (node, part, value), in order.
        reads: the nodes that show a part to others.
    """

    nodes: set[fx.Node] = field(default_factory=set)
    writes: list[tuple[fx.Node, _Part, fx.Node]] = field(default_factory=list)
    reads: dict[fx.Node, _Part] = field(default_factory=dict)


def take_written_values(graph: fx.Graph, form: CallForm) -> None:
    """Rewrites every such buffer of the model in place."""
    for buffer, writers in writers_of(graph.nodes).items():
        if buffer.op != "placeholder" or form.roles[buffer] != "owned":
            continue
        uses = _uses(buffer, form)
        if uses is None or set(writers) != {node for node, *_ in uses.writes}:
            continue
        written = {read: found for read, part in uses.reads.items() if (found := _written_last(uses, read, part)) is not None}
        of_tokens = all(any(not isinstance(end, int) for dim in part for end in dim) for _, part, _ in uses.writes)
        if len(written) < len(uses.reads) or not (written or of_tokens):
            continue
        for read, (write, value) in written.items():
            with graph.inserting_before(write.next):
                taken = _as_read(value, read)
            for user in [user for user in read.users if user not in uses.nodes]:
                user.replace_input_with(read, taken)
        for node in sorted(uses.nodes, reverse=True):
            graph.erase_node(node)


def _uses(buffer: fx.Node, form: CallForm) -> _Uses | None:
    """None if something else is done with the buffer than writing and reading parts."""
    uses, pending = _Uses(), [buffer]
    while pending:
        node = pending.pop()
        for user in node.users:
            uses.nodes.add(user)
            if name_of(user) == "to" and sizes_of(user) == sizes_of(buffer) and storages_of([user]) == storages_of([buffer]):
                pending.append(user)  # cache.to(x) of the same dtype and device is the cache itself
                continue
            part = _part_of(user, form)
            if part is None or user.args[0] is not node:
                return None
            if user.target is operator.setitem or name_of(user) == "index_copy_":
                value: Any = user.args[2] if user.target is operator.setitem else argument_of(user, 3, "source")
                if user.users:
                    return None
                uses.writes.append((user, part, value))  # checked below
                continue
            copies = [each for each in user.users if name_of(each) == "copy_" and each.args[0] is user and not each.users]
            uses.nodes.update(copies)
            uses.writes += [(each, part, each.args[1]) for each in copies]  # type: ignore[misc]
            if len(copies) < len(user.users):
                uses.reads[user] = part
    uses.writes.sort(key=lambda write: write[0])
    return uses if all(isinstance(value, fx.Node) for *_, value in uses.writes) else None


def _part_of(node: fx.Node, form: CallForm) -> _Part | None:
    """Which part of its first argument a node reads or writes; None if that is not a slice, a number or the call's tokens in each dim."""
    sizes = sizes_of(node.args[0]) if node.args else ()
    if node.target in (operator.getitem, operator.setitem):
        index: Any = node.args[1]
        slices = list(index) if isinstance(index, tuple) else [index]
    elif name_of(node) == "index_copy_":
        place: Any = argument_of(node, 1, "dim")
        slices = [slice(None)] * (place % len(sizes)) + [argument_of(node, 2, "index")]
    elif name_of(node) == "narrow":
        given = arguments_of(node, ("input", "dim", "start", "length"))
        dim, start, length = (given[name] for name in ("dim", "start", "length"))
        if start != 0 or not isinstance(dim, int):
            return None
        slices = [slice(None)] * (dim % len(sizes)) + [slice(0, length)]
    else:
        return None
    if sum(isinstance(each, fx.Node) for each in slices) == 1:
        slices = [slice(0, _all_tokens(each, form)) if isinstance(each, fx.Node) else each for each in slices]
    if any(isinstance(each, slice) and each.stop is _OTHER for each in slices):
        return None
    slices = [slice(each, each + 1) if type(each) is int and each >= 0 else each for each in slices]
    if len(slices) > len(sizes) or not all(isinstance(each, slice) and each.step in (None, 1) for each in slices):
        return None
    slices += [slice(None)] * (len(sizes) - len(slices))
    found = []
    for each, size in zip(slices, sizes, strict=True):
        first, last = (symbol(value_of(end)) for end in (0 if each.start is None else each.start, size if each.stop is None else each.stop))
        found.append((first, size if isinstance(last, int) and last > size else last))
    return tuple(found) if all(not isinstance(end, int) or end >= 0 for part in found for end in part) else None


def _all_tokens(index: fx.Node, form: CallForm) -> Any:
    """T, if a tensor holds the places of the call's tokens, 0 to T - 1; else `_OTHER`."""
    tokens, node = form.num_tokens, index
    if len(sizes_of(index)) != 1 or sizes_of(index)[0] != tokens:
        return _OTHER
    while name_of(node) in _SHOWN and isinstance(node.args[0], fx.Node):
        others = [each for each in node.all_input_nodes if each is not node.args[0]]
        if node.target is operator.getitem and any(isinstance(value_of(each), Tensor) for each in others):
            return _OTHER  # in another order
        node = node.args[0]
    if node.op == "placeholder":
        return tokens if form.roles.get(node) == "position_ids" else _OTHER
    if name_of(node) != "arange":
        return _OTHER
    start, end, step = (node.args if len(node.args) == 3 else (*node.args, 1) if len(node.args) == 2 else (0, *node.args, 1))[:3]
    given = {"start": start, "end": end, "step": step} | dict(node.kwargs)
    return tokens if (given["start"], symbol(value_of(given["end"])), given["step"]) == (0, tokens, 1) else _OTHER


def _written_last(uses: _Uses, read: fx.Node, part: _Part) -> tuple[fx.Node, fx.Node] | None:
    """The write of the part that a read shows, and its value; None if other writes reach that part, or the value is another by then."""
    for write, written, value in reversed(uses.writes):
        if written != part:
            if not _apart(written, part):
                return None
            continue
        # A read is a view: it shows what is written until it is used. What was written is a copy of the value at that time.
        output = next(node for node in reversed(write.graph.nodes) if node.op == "output")
        used_later = all(user > write for user in read.users if user not in uses.nodes)
        return (write, value) if used_later and _fits(read, value) and not is_written({value}, write, output) else None
    return None


def _apart(one: _Part, other: _Part) -> bool:
    """Whether two parts have no element in common: in some dim one ends before the other begins."""
    for (first, last), (first_other, last_other) in zip(one, other, strict=True):
        ends = (first, last, first_other, last_other)
        if all(isinstance(end, int) for end in ends) and (last <= first_other or last_other <= first):
            return True
    return False


def _fits(read: fx.Node, value: fx.Node) -> bool:
    sizes, given = sizes_of(read), sizes_of(value)
    more = len(sizes) - len(given)
    return (
        more >= 0 and given == sizes[more:] and all(size == 1 for size in sizes[:more]) and value_of(value).device == value_of(read).device
    )


def _as_read(value: fx.Node, read: fx.Node) -> fx.Node:
    """A written value in the shape and dtype in which the buffer returns it."""
    for _ in range(len(shape_of(read)) - len(shape_of(value))):
        value = call_with_value(read.graph, "unsqueeze", value, 0)
    dtype = value_of(read).dtype
    return value if value_of(value).dtype == dtype else call_with_value(read.graph, "to", value, dtype)
