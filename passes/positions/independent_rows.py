"""Checks that everything computed between the ops treats rows independently: in a ragged batch, neighbouring rows belong to other requests.

The rewritten graph is run twice on random rows. The second time half of the tokens, including the first and the last, are replaced, along
with the ops' results for them, and one of them is at a far position. The other half's inputs to ops and logits must not change.

Where the graph holds a number that may be a distance between tokens it runs on more tokens than that, too. The products with weights are
then drawn at random, anew for each row that changed, since computing them would take too long.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.errors import UnsupportedError, UnsupportedModule
from paged_attn.attn_ops.model_code import MODEL_ERRORS
from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.ops.kinds import KINDS
from paged_attn.attn_ops.ops.module import MODULE, MODULE_ON_ALL_TOKENS
from paged_attn.attn_ops.ops.positions import BATCH_POSITIONS, REQUEST_LENGTHS
from paged_attn.passes.find.attention_site import module_path
from paged_attn.passes.fx.call_form import CallForm, Values
from paged_attn.passes.fx.graph_tools import LINEARS, as_traced, call, reached, symbol, value_of
from paged_attn.passes.fx.memory import written_values
from paged_attn.passes.fx.slicing import attribute_of
from paged_attn.passes.fx.token_data import read_inputs, token_axis
from paged_attn.passes.positions.distances import distances

logger = logging.getLogger("paged_attn")

FEWEST, TOKENS, MOST_TOKENS = 7, 37, 601
WORK = {"cpu": 1 << 31, "cuda": 1 << 43}  # multiplications in each of the two runs
FARTHEST = 16384  # distances that are looked for
NUMBERS = {"cpu": 1 << 29, "cuda": 1 << 33}  # that are computed or drawn for one in each of the two runs: some seconds
MOVED = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative to the largest value: rows may round differently where experts are added up
MOVED_16_BIT = 2e-2
FAR = (
    " Only a far position does so: with max_position_embeddings at most the length up to which the others stay as they are, it can be "
    "served."
)
_COUNTED = (BATCH_POSITIONS, REQUEST_LENGTHS)
_GIVEN = {kind.op for kind in KINDS} - {MODULE, *_COUNTED}  # their rows count as independent: the op's own proof says so


class MixesRows(UnsupportedModule):
    """`module` mixes tokens, and is neither an attention nor a recurrent layer.

    Attributes:
        by_position: only a token at a far position affects others; other tokens do not.
    """

    def __init__(self, module: str, words: str, by_position: bool) -> None:
        self.by_position = by_position
        super().__init__(module, words)


class FixedParts(MixesRows):
    """A module cuts its rows into as many parts as the traced number of tokens needs, as in x.split(40)."""


class _Values(NamedTuple):
    """A node's value in each run: with the original tokens, and with half of them changed."""

    kept: Any
    changed: Any


def check_independent_rows(graph: fx.Graph, form: CallForm, values: Values, longest: int | None = None) -> str:
    """Runs a rewritten graph as described above; returns words for the log.

    Args:
        longest: the model's number of positions, if known.

    Raises:
        MixesRows: a row of an unchanged token changed; it names the module where rows mix first.
    """
    plain = {node: dict.__getitem__(values, node) for node in graph.nodes if node.op == "placeholder"}  # not recorded as read by a proof
    seen, failed = list[int](), dict[int, fx.Node | None]()
    looked_at, lengths = 0, _lengths(graph, form, plain, longest)
    far = _far_lengths(graph, form, plain, longest, max(lengths, default=0))
    for tokens in (*far, *lengths):
        drawn = tokens in far
        for position in ((longest or 4 * tokens) - 1, 0) if tokens > FEWEST or not seen else ():
            run = _Run(graph, form, plain, tokens, position, drawn)
            try:
                if (moved := run.mixed_end()) is not None:
                    raise run.refusal(moved, position > 0 and _Run(graph, form, plain, tokens, 0, drawn).mixed_end() is None)
            except UnsupportedError:
                raise
            except MODEL_ERRORS as error:  # including too little memory for so many tokens
                why = f"{type(error).__name__}: {error}"
                logger.info("rows of %d tokens, one of them at position %d, cannot be evaluated: %s", tokens, position, why)
                if not position:
                    failed[tokens] = run.at
                continue
            seen, looked_at = [*seen, tokens], run.looked_at
            break
    if not seen:
        _refuse_one_length(graph, form, plain)
        return "not evaluated: it does not run on random rows"
    if (shorter := min(failed, default=max(seen))) < max(seen):
        raise _fixed_parts(failed[shorter], shorter, max(seen))
    return (
        f"{looked_at} values that ops and logits are made of hold a row of each token's own, seen on {' and '.join(map(str, seen))} tokens"
    )


def _refuse_one_length(graph: fx.Graph, form: CallForm, values: Values) -> None:
    """For a graph that ran with no other length. Raises FixedParts if it does with that of the trace."""
    traced = as_traced(values[form.input_ids].shape[-1])
    if not isinstance(traced, int):
        return
    try:
        _Run(graph, form, values, traced, 0).mixed_end()
    except MODEL_ERRORS:
        return
    half = _Run(graph, form, values, traced // 2, 0)
    try:
        half.mixed_end()
    except MODEL_ERRORS:
        raise _fixed_parts(half.at, traced // 2, traced) from None


def _fixed_parts(node: fx.Node | None, short: int, long: int) -> FixedParts:
    assert node is not None
    where = module_path(node) or "the model's forward"
    words = (
        f"{where}: {node.name} runs with {long} tokens and not with {short}: how many parts it makes or takes depends on the number of "
        "tokens, as in x.split(40)"
    )
    return FixedParts(module_path(node), words, by_position=False)


def _lengths(graph: fx.Graph, form: CallForm, values: Values, longest: int | None) -> list[int]:
    """The numbers of tokens to try: many, since a part may combine tokens that are far apart; fewer, which exposes a limited capacity; and
    very few, for models with few positions. None of them equals another size of the model. Ranks that add up rows must all use the same
    numbers, so these do not depend on the sizes of their shards."""
    known = _limits(form, longest)
    if any("_c10d_functional" in str(node.target) for node in graph.nodes):
        return [count for count in dict.fromkeys(min([count, *known]) for count in (TOKENS, FEWEST)) if count > 2]
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    work = WORK[_device_of(values)]
    most = min(MOST_TOKENS, work // max(1, sum(tensor.numel() for tensor in tensors)))
    sizes = {size for tensor in tensors for size in tensor.shape}
    wanted = [min([count, *known]) for count in (max(TOKENS, most), TOKENS, FEWEST)]
    found = [next((count for count in range(most, FEWEST, -1) if count not in sizes), most) for most in wanted]
    return [count for count in dict.fromkeys(found) if count > 2]


def _device_of(values: Values) -> str:
    return "cuda" if any(isinstance(value, Tensor) and value.is_cuda for value in values.values()) else "cpu"


def _limits(form: CallForm, longest: int | None) -> list[int]:
    return [limit for limit in (form.max_tokens, longest and longest - 2) if limit]


def _far_lengths(graph: fx.Graph, form: CallForm, values: Values, longest: int | None, tried: int) -> list[int]:
    """More tokens than the largest number of the graph that may be a distance, if calls of `tried` tokens do not show it."""
    if any("_c10d_functional" in str(node.target) for node in graph.nodes):
        return []
    sizes = {size for value in values.values() if isinstance(value, Tensor) for size in value.shape}
    most = min([FARTHEST, *(limit - TOKENS for limit in _limits(form, longest))])
    found = distances(graph, form, sizes, tried - TOKENS, most)
    if not found:
        return []
    counts = [next(count for count in range(number + TOKENS, number + 2 * TOKENS + len(sizes)) if count not in sizes) for number in found]
    row = sum(_numel(node, form, 2) - _numel(node, form, 1) for node in graph.nodes)
    few = [count for count in counts if count * row <= NUMBERS[_device_of(values)]]
    if len(few) < len(counts):
        logger.info("%d tokens are too many to see whether rows so far apart are mixed", counts[-1])
    return few[-1:]


def _numel(node: fx.Node, form: CallForm, tokens: int) -> int:
    """The size of a value that grows with the tokens alone; 0 for any other, such as rows that the data choose."""
    value = value_of(node)
    sizes = [symbol(size) for size in value.shape] if isinstance(value, Tensor) else []
    free = {each for size in sizes if not isinstance(size, int) for each in size.free_symbols}
    if free != {form.num_tokens}:
        return 0
    return math.prod(size if isinstance(size, int) else int(size.subs(form.num_tokens, tokens)) for size in sizes)


class _Run:
    """Runs the graph with both sets of tokens side by side; with `drawn`, products with weights are drawn at random."""

    def __init__(self, graph: fx.Graph, form: CallForm, values: Values, tokens: int, position: int, drawn: bool = False) -> None:
        self.graph, self.form, self.values, self.tokens, self.position, self.drawn = graph, form, values, tokens, position, drawn
        self.looked_at = 0
        self.at: fx.Node | None = None  # what it computes
        self.changes = torch.rand(tokens, generator=torch.Generator().manual_seed(31)) < 0.5
        self.changes[0] = self.changes[-1] = True
        self.changes[tokens // 2] = False
        last: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            last.update(dict.fromkeys(node.all_input_nodes, node))
        self.dropped: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last.items():
            self.dropped.setdefault(user, []).append(node)

    def mixed_end(self) -> fx.Node | None:
        """The first op input or output that moved by more than rounding, which adds up over layers and can flip near-ties of a router."""
        return None if self.moved_end() is None else self.moved_end(steady=True)

    def moved_end(self, steady: bool = False) -> fx.Node | None:
        """The first input of an op, or output of the graph, in which the row of an unchanged token moved.

        Args:
            steady: rows that moved by less than the limit are reset to the unchanged ones.
        """
        for node, known in self._nodes(keep=False, steady=steady):
            if node.op != "output" and node.target not in _GIVEN:
                continue
            for source in read_inputs(node):
                self.looked_at += 1
                given = known[source].kept
                if node.op == "output" and isinstance(given, Tensor) and self._axis(source, given) is None:
                    continue  # not one row per token, which the caller of the graph refuses
                if source.op != "placeholder" and self._moves(source, known[source]):
                    return source
        return None

    def refusal(self, moved: fx.Node, by_position: bool) -> MixesRows:
        *_, (_, known) = self._nodes(keep=True)
        behind = {*reached([moved], read_inputs)}
        first = next(
            (node for node in self.graph.nodes if node in behind and node.op != "placeholder" and self._moves(node, known[node])), moved
        )
        where = module_path(first) or "the model's forward"
        return MixesRows(
            module_path(first),
            f"{where}: {first.name} mixes tokens, in a way that is neither attention nor a recurrent layer with a cache: changing "
            "a token or its position also changes rows of other tokens (a shift, a convolution, a sum or mean along the sequence, the "
            "largest position of a call), which in a ragged batch may be other requests'." + (FAR if by_position else ""),
            by_position,
        )

    def _nodes(self, keep: bool, steady: bool = False) -> Iterator[tuple[fx.Node, dict[fx.Node, _Values]]]:
        generator = torch.Generator().manual_seed(29)
        known: dict[fx.Node, _Values] = {}
        with torch.no_grad():
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    known[node] = self._placeholder(node, generator)
                elif node.op == "get_attr":
                    known[node] = _Values(attribute_of(node), attribute_of(node))
                elif node.op != "output":
                    self._compute(node, known, generator)
                    if steady and not self._moves(node, known[node]):
                        known[node] = self._steady(node, known[node])
                yield node, known
                for other in self.dropped.get(node, ()) if not keep else ():
                    del known[other]

    def _compute(self, node: fx.Node, known: dict[fx.Node, _Values], generator: torch.Generator) -> None:
        self.at = node
        if node.target in _COUNTED:
            for target in written_values(node):
                self._count(known[target], node.target is BATCH_POSITIONS)
            known[node] = _Values(None, None)
            return
        if node.target in _GIVEN and node.target not in (EXPERTS, MODULE_ON_ALL_TOKENS) and (targets := written_values(node)):
            for target in targets:
                self._fill(known[target], generator)
            known[node] = _Values(None, None)
            return
        if self.drawn and node.target in LINEARS and (drawn := self._product(node, known, generator)) is not None:
            known[node] = drawn
            return
        results = []
        for side in (0, 1):
            given = {source: known[source][side] for source in node.all_input_nodes}
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), given.__getitem__)
            with torch.random.fork_rng(devices=[]):
                results.append(call(node, args, kwargs))
        known[node] = _Values(*results)

    def _product(self, node: fx.Node, known: dict[fx.Node, _Values], generator: torch.Generator) -> _Values | None:
        """Random rows in place of a product with a weight; other ones for the rows of x that changed. None if x has no row per token."""
        x, weight = node.args[:2]
        if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or weight.op not in ("placeholder", "get_attr"):
            return None
        one, other = known[x]
        axis = self._axis(x, one)
        if axis is None or axis == one.dim() - 1:
            return None
        shape = (*one.shape[:-1], len(known[weight].kept))
        seed = int(torch.randint(1 << 31, (), generator=generator))
        here = torch.Generator(one.device).manual_seed(seed)  # on a GPU, drawing on the host would take minutes
        kept, fresh = (torch.randn(shape, generator=here, device=one.device, dtype=one.dtype) for _ in range(2))
        moved = ((one != other) & ~((one != one) & (other != other))).any(-1, keepdim=True)
        return _Values(kept, torch.where(moved, fresh, kept))

    def _placeholder(self, node: fx.Node, generator: torch.Generator) -> _Values:
        role, value = self.form.roles.get(node, ""), self.values[node]
        if role == "tokens":
            return _Values(self.tokens, self.tokens)
        if role == "num_logits":
            return _Values(len(self._logits_rows()), len(self._logits_rows()))
        if role == "logits_rows":
            rows = torch.tensor(self._logits_rows(), device=value.device, dtype=value.dtype)
            return _Values(rows, rows)
        if role == "position_ids":
            both = _Values(*(torch.zeros(1, self.tokens, dtype=value.dtype, device=value.device) for _ in range(2)))
            self._count(both, True)
            return both
        if role == "input_ids":
            ids = torch.randint(2, 16, (self.tokens,), generator=generator)
            other = torch.where(self.changes, 17 - ids, ids)
            shape = [self.tokens if symbolic else 1 for symbolic in (token_axis(node, self.form) == axis for axis in range(value.dim()))]
            return _Values(*(each.view(shape).to(value.device, value.dtype) for each in (ids, other)))
        if isinstance(value, Tensor):  # the model's own tensors are never written
            written = any(node in written_values(user) for user in node.users)
            return _Values(value.detach().clone(), value.detach().clone()) if written else _Values(value, value)
        return _Values(as_traced(value), as_traced(value))

    def _logits_rows(self) -> list[int]:
        return [row for row in range(self.tokens) if not self.changes[row]][:3]

    def _count(self, both: _Values, positions: bool) -> None:
        """Fills in positions, or the lengths of requests. In the changed run the first token is at the far position."""
        for side, value in enumerate(both):
            rows = value.view(-1)
            rows.copy_(torch.arange(self.tokens) if positions else torch.full((self.tokens,), self.tokens))
            if side:
                rows[0] = self.position if positions else self.position + 1

    def _fill(self, both: _Values, generator: torch.Generator) -> None:
        """Fills in random rows, half of which differ between the runs."""
        rows, others = (torch.randn(both.kept.shape, generator=generator) for _ in range(2))
        axis = next(axis for axis, size in enumerate(rows.shape) if size == self.tokens)
        both.kept.copy_(rows)
        both.changed.copy_(self._where_changed(axis, others, rows))

    def _axis(self, node: fx.Node, value: Tensor) -> int | None:
        axis = token_axis(node, self.form) if "example_value" in node.meta else None
        if axis is None or value.shape[axis] != self.tokens:
            return next((at for at, size in enumerate(value.shape) if size == self.tokens), None)
        return axis

    def _steady(self, node: fx.Node, both: _Values) -> _Values:
        one, other = both
        if not isinstance(one, Tensor) or torch.equal(one, other) or (axis := self._axis(node, one)) is None:
            return both
        return _Values(one, self._where_changed(axis, other, one))

    def _where_changed(self, axis: int, changed: Tensor, kept: Tensor) -> Tensor:
        """Rows of `changed` for the changed tokens, of `kept` for the others; rows lie along `axis`."""
        changes = self.changes.to(kept.device).view([-1 if at == axis else 1 for at in range(kept.dim())])
        return torch.where(changes, changed, kept)

    def _moves(self, node: fx.Node, both: _Values) -> bool:
        one, other = both
        if not isinstance(one, Tensor):
            return not isinstance(one, (tuple, list, type(None))) and bool(one != other)
        if (axis := self._axis(node, one)) is not None:
            rest = (~self.changes).nonzero().flatten().to(one.device)
            one, other = one.index_select(axis, rest), other.index_select(axis, rest)
        if one.shape != other.shape:
            return True
        if torch.equal(one, other):  # as most are, bit for bit; the rest costs nine times as much
            return False
        if not one.is_floating_point() and not one.is_complex():
            return True
        limit = MOVED.get(one.dtype, MOVED_16_BIT) * float(one.abs().nan_to_num(posinf=0.0).max())
        return not torch.allclose(one, other, rtol=0.0, atol=limit, equal_nan=True)
