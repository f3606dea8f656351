"""Checks that a value computed from token ids depends only on its own row's id: in a ragged batch, other rows belong to other requests.

A probe of a few tokens cannot show which ids make a difference (such as an end of text that restarts positions). So values computed only
from ids are evaluated on every id that the model has: on all of them in two orders, and on half of them. Each id must give the same value.
One value for all rows (whether the first id is a beginning of text) is evaluated with every id at every position of a short call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.ops.positions import BATCH_POSITIONS
from paged_attn.passes.find.attention_site import module_path
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import depends_on, embedding_of, token_dims, value_of
from paged_attn.passes.fx.memory import writers_of, written_values
from paged_attn.passes.fx.slicing import ancestors
from paged_attn.passes.fx.token_data import lookup_of, read_inputs, token_axis
from paged_attn.passes.positions.row_probe import RowProbe

WIDEST = 64  # values with more numbers per token than this (embeddings, one-hot columns) are taken to be the token's own
FLAGS = 4  # a table with at most this many numbers per id holds flags, not embeddings
SHORT_CALL, IDS_AT_ONCE = 9, 4096
DEFAULT_IDS = 4096  # number of ids if no embedding table shows it


def check_id_values(graph: fx.Graph, form: CallForm, values: Values) -> None:
    """Checks that a row's values do not depend on the ids of other rows, as described above.

    Raises:
        UnsupportedError: they do; the message names the module.
    """
    if isinstance(form.num_tokens, int):
        return
    made = _made_of_ids(graph, form)
    counted = {node for each in graph.find_nodes(op="call_function", target=BATCH_POSITIONS) for node in each.all_input_nodes}
    positions = [node for node in graph.nodes if form.roles.get(node) == "position_ids" or node in counted]
    count = _num_ids(graph, form.input_ids, made)
    generator = torch.Generator().manual_seed(23)
    one, two = (torch.randperm(count, generator=generator) for _ in range(2))
    runs, writers = (one, two, two[: count // 2]), writers_of(graph.nodes)
    live = set(ancestors(output := graph.output_node(), output, writers=writers, through_shapes=False))
    for node in sorted(made):
        shared = isinstance(value_of(node), Tensor) and not token_dims(node, form.num_tokens)  # one value for all rows of a call
        if node in live and shared and not _is_constant(node, RowProbe(form, values, node, writers), positions, count):
            raise _refusal(node)
        if isinstance(value_of(node), (tuple, list)) or all(user in made for user in node.users):
            continue  # the values read from it are checked instead
        probe = RowProbe(form, values, node, writers)
        seen = [_by_id(node, probe, positions, run) for run in runs]
        if not (_same(seen[0], seen[1]) and _same(seen[1], seen[2], two[: count // 2])):
            raise _refusal(node)


def _refusal(node: fx.Node) -> UnsupportedError:
    return UnsupportedError(
        f"{module_path(node) or 'the model'}: {node.name} is made of token ids, and a row's value also depends on the ids of other "
        "rows (positions or segments that are counted along input_ids, a token that changes those behind it, the first token of a call). "
        "In a ragged batch those belong to other requests. If it is positions, call the model with position_ids, if it accepts them."
    )


def _is_constant(node: fx.Node, probe: RowProbe, positions: list[fx.Node], count: int) -> bool:
    """Whether a value that all tokens share is the same for every id at every position of a call of SHORT_CALL tokens, and for calls of one
    id; True if it cannot be evaluated on such calls."""
    form = probe.form
    like = value_of(form.input_ids)
    given = {each: torch.ones([1] * (value_of(each).dim() - 1) + [SHORT_CALL], dtype=torch.int64, device=like.device) for each in positions}

    def of_row(row: Tensor) -> Any:
        return probe.at(node, SHORT_CALL, {**given, form.input_ids: row[None]})

    first: Tensor | None = None
    for ids in torch.arange(count, device=like.device, dtype=like.dtype).split(IDS_AT_ONCE):
        rows = ((ids + 1) % count)[:, None, None].repeat(1, SHORT_CALL + 1, SHORT_CALL)
        rows[:, range(SHORT_CALL), range(SHORT_CALL)] = rows[:, -1] = ids[:, None]
        try:
            try:
                seen = torch.func.vmap(of_row)(rows.flatten(0, 1))
            except RuntimeError:  # an operation that vmap does not know
                seen = torch.stack([of_row(row) for row in rows.flatten(0, 1)])
        except (RuntimeError, IndexError, KeyError):
            return True
        first = seen[:1] if first is None else first
        if not bool(((seen == first) | ((seen != seen) & (first != first))).all()):
            return False
    return True


def _by_id(node: fx.Node, probe: RowProbe, positions: list[fx.Node], run: Tensor) -> Any:
    """A value on a row of these ids, all at position 1: its rows in the order of the ids, or unchanged if it has no rows. None if it
    cannot be evaluated by itself, or not on so many tokens."""
    form = probe.form
    ids = run[None].to(value_of(form.input_ids).device, value_of(form.input_ids).dtype)
    given = {each: torch.ones_like(ids).view(*[1] * (value_of(each).dim() - 1), -1) for each in positions}
    try:
        value = probe.at(node, len(run), {**given, form.input_ids: ids})
    except (RuntimeError, IndexError, KeyError):
        return None
    axis = token_axis(node, form)
    if axis is not None and isinstance(value, Tensor) and value.shape[axis] != len(run):
        return None  # it covers only some tokens
    return value if axis is None or not isinstance(value, Tensor) else value.movedim(axis, 0)[torch.argsort(run).to(value.device)]


def _made_of_ids(graph: fx.Graph, form: CallForm) -> set[fx.Node]:
    """Values made only of ids, positions and numbers, with few numbers for each token or in total."""
    found = {form.input_ids}
    others = {node for node, role in form.roles.items() if role not in ("owned", "tokens", "input_ids", "position_ids")}
    for node in graph.nodes:
        sources = set(read_inputs(node))
        if node.op in ("placeholder", "output"):
            continue
        if sources & others or (sources & found and (any(map(_is_table, sources)) or not _is_narrow(value_of(node), form))):
            others |= {node} | written_values(node)
        elif sources & found:
            found |= {node} | written_values(node)
    return found - others - {form.input_ids}


def _is_table(node: fx.Node) -> bool:
    """Whether it is a table with more than flags for each id."""
    value = value_of(node)
    if node.op not in ("placeholder", "get_attr") or not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        return False
    return int(value.numel()) > FLAGS * int(value.shape[0])


def _is_narrow(value: Any, form: CallForm) -> bool:
    """Whether a value, or each of several, has few numbers for each token or in total."""
    if isinstance(value, (tuple, list)):
        return all(_is_narrow(each, form) for each in value)
    if not isinstance(value, Tensor):
        return True
    fixed = [size for size in value.shape if not depends_on(size, form.num_tokens)]
    if value.dim() - len(fixed) > 1 or not all(isinstance(size, int) for size in fixed):
        return False
    return int(torch.Size(fixed).numel()) <= WIDEST


def _num_ids(graph: fx.Graph, ids: fx.Node, made: set[fx.Node]) -> int:
    """The rows of the smallest table indexed with the ids; if there is none, of the largest one indexed with values made of them."""
    found = [(lookup.at, lookup.rows) for node in graph.nodes if (lookup := lookup_of(node)) is not None]
    found += [looked_up for node in graph.nodes if (looked_up := embedding_of(node)) is not None]
    rows = [(at, size) for at, table in found if isinstance(size := value_of(table).shape[0], int)]
    own, further = [size for at, size in rows if at is ids], [size for at, size in rows if at in made]
    return min(own) if own else max(further, default=DEFAULT_IDS)


def _same(one: Any, other: Any, only: Tensor | None = None) -> bool:
    """Whether two values by id are equal, in the first only for the ids `only`. True if one of them could not be evaluated."""
    if one is None or other is None:
        return True
    if not isinstance(one, Tensor):
        return bool(one == other)
    if only is not None and one.shape != other.shape:
        one = one[only.sort().values.to(one.device)]
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
