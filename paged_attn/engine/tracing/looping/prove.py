"""Finds where a block uses its experts, with experts that identify themselves, and proves it with the real ones."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate

from paged_attn.attn_ops.errors import UnsupportedError, first_line
from paged_attn.attn_ops.ops.experts import EXPERTS, ONE_BY_ONE
from paged_attn.backends.experts.base import ExpertsProblem
from paged_attn.backends.selection.experts import ExpertsSelection, select_experts
from paged_attn.engine.tracing.experts_as_ops import NOT_EXPERTS, agrees, loud
from paged_attn.engine.tracing.experts_layout import Operands
from paged_attn.engine.tracing.looping.calls import BlockCall, GivenTensor, NotProved
from paged_attn.engine.tracing.looping.common_steps import TwoTapes
from paged_attn.engine.tracing.looping.expert_mlp import ExpertMLP, expert_mlps
from paged_attn.engine.tracing.looping.product_weights import ProductWeights, product_weights
from paged_attn.engine.tracing.looping.program import Evaluation, ExpertsSite, Program, program_of
from paged_attn.engine.tracing.looping.stacked_pair import StackedPair, stacked_pairs
from paged_attn.engine.tracing.looping.tape import Slot, Tape, tensors_in
from paged_attn.engine.tracing.while_tracing import no_collections
from paged_attn.hashing.code_files import executed_files
from paged_attn.passes.recompute.code_numbers import crowd_of

TOKENS = (37, 53)  # rows of the two tapes; few other sizes are multiples of these
MOST_TRIED = 24  # candidate sites per block
SPREADS = (1.0, 8.0, 0.02, 100.0)  # of the logits; the third leaves ties in 16 bits, the last meets any limit on them
ROWS = (24, 3)
OTHER_NUMBERS = "it gives other numbers than its experts' rows by the weights that its router shows"
OTHER_GATE = "its experts compute nothing that is known between their products"


Experts = ExpertMLP | StackedPair | ProductWeights


@dataclass(frozen=True)
class ProvedBlock:
    """What a block computes, and which backend computes its experts; `files`: whose code ran when that was found."""

    mlp: Experts
    program: Program
    backend: ExpertsSelection
    files: frozenset[str]


def proved_block(block: nn.Module, experts: Sequence[nn.Module], call: BlockCall, backend: str = "auto") -> ProvedBlock:
    """Proved for this block, and for all that differ from it in weights alone.

    Args:
        experts: a list of them; or two modules with a stacked weight each; or the one module that holds their weights.

    Raises:
        NotProved: it is not known what the block computes.
    """
    reason: NotProved | UnsupportedError | None = None
    with torch.no_grad():
        for ways in _ways(block, experts, call):
            try:
                return _proved_as(ways, block, experts, call, backend)
            except (NotProved, UnsupportedError) as error:  # the latter: its backend wants gate and up in the other order
                if isinstance(error, NotProved) and isinstance(ways[0], ExpertMLP):
                    raise
                reason = reason or error
    raise reason or NotProved("nothing is known that its experts may compute")


def _ways(block: nn.Module, experts: Sequence[nn.Module], call: BlockCall) -> Iterator[Sequence[Experts]]:
    """What the experts may be, in groups that differ in what stands between their products alone."""
    if len(experts) == 1:
        yield from product_weights(experts[0], {each.shape[-1] for each in call.tensors})
    elif pairs := stacked_pairs(block, experts):
        yield pairs
    else:
        yield from ([mlp] for mlp in expert_mlps(experts))


def _proved_as(ways: Sequence[Experts], block: nn.Module, experts: Sequence[nn.Module], call: BlockCall, backend: str) -> ProvedBlock:
    mlp = ways[0]
    operands = mlp.stacked(*mlp.linears(experts))
    if isinstance(mlp, ExpertMLP):
        _check_each(experts, mlp, operands, select_experts(backend, ExpertsProblem.of(mlp.spec, operands[0])).name)
    if mlp.spec.experts > mlp.spec.hidden:
        raise NotProved(f"it has {mlp.spec.experts} experts of rows of {mlp.spec.hidden}; known are at most as many as a row is wide")
    try:
        proof = _Proof(block, experts, call, ways, operands, backend)
        return ProvedBlock(*proof.found(), frozenset(proof.files))
    except NOT_EXPERTS as error:
        raise NotProved(f"it cannot be called on rows alone: {first_line(error)}") from error


def _check_each(experts: Sequence[nn.Module], mlp: ExpertMLP, operands: Operands, backend: str) -> None:
    """Every expert beside the op, on rows that are for it alone."""
    numbers, w1 = torch.Generator().manual_seed(2), operands[0]
    x = torch.randn(2 * len(experts), mlp.spec.hidden, generator=numbers).to(w1.device, w1.dtype)
    ids = torch.arange(len(experts), device=w1.device).repeat_interleave(2)[:, None]
    expected = torch.cat([expert(rows.clone()) for expert, rows in zip(experts, x.split(2), strict=True)])
    given = EXPERTS(x, ids, torch.ones_like(ids, dtype=w1.dtype), *operands, *mlp.gating.arguments, backend)
    if not agrees(expected, given):
        raise NotProved("its experts give other numbers than the op does with their weights")


class _Proof:
    def __init__(
        self, block: nn.Module, experts: Sequence[nn.Module], call: BlockCall, ways: Sequence[Experts], operands: Operands,
        backend: str,
    ) -> None:  # fmt: skip
        self.block, self.experts, self.call, self.ways, self.operands, self.backend = block, experts, call, ways, operands, backend
        self.mlp = ways[0]
        self.device = operands[0].device
        self.own: dict[str, Tensor] = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        self.given = tuple(f"given {index}" for index in range(len(call.tensors)))
        self.made: dict[float, list[Tensor]] = {}

    def found(self) -> tuple[Experts, Program, ExpertsSelection]:
        """Raises NotProved with the reason against the last site that was tried."""
        with no_collections(), executed_files() as self.files:  # otherwise code that the garbage collector runs would count as the block's
            tapes, outputs, fed = zip(*(self._recorded(tokens) for tokens in TOKENS), strict=True)
        both = TwoTapes((tapes[0], tapes[1]), TOKENS, self.mlp.spec.experts)
        if not fed[0] or not fed[1]:
            raise NotProved("it does not call its experts")
        common = both.common()
        try:
            output = both.generalised(*outputs)
        except ValueError as error:
            raise NotProved(f"what it returns depends on its data: {error}") from None
        reason = NotProved("what it returns is not a sum of its experts' rows of the tokens, by weights that stand in what it computes")
        for count, site in enumerate(self._sites(tapes[0], torch.cat(fed[0]))):
            if count == MOST_TRIED:
                break
            try:
                refuse_other_branches(tapes[0], site)
                part = functools.partial(
                    program_of, tapes[0], common, site, self.given, self.call.tensors[0].axis, output, self.mlp.spec.experts
                )
                mlp, program, selection = self._with_gate(part)
                self._check(program, tapes[0])
            except NotProved as error:
                reason = error
                continue
            return mlp, program, selection
        raise reason

    def _with_gate(self, part: Callable[[Sequence[Any]], Program]) -> tuple[Experts, Program, ExpertsSelection]:
        """The first of what may stand between the products that gives the block's numbers, also for large ones."""
        reason: UnsupportedError | None = None
        for mlp in self.ways:
            tried = part((*mlp.gating.arguments, ONE_BY_ONE))
            if not all(self._looks_right(mlp, tried, size) for size in (1.0, loud(self.operands[0]))):
                continue
            try:
                selection = select_experts(self.backend, ExpertsProblem.of(mlp.spec, *self.operands[:2]))
            except UnsupportedError as error:
                reason = reason or error
                continue
            return mlp, part((*mlp.gating.arguments, selection.name)), selection
        raise reason or NotProved(f"{OTHER_NUMBERS} ({ROWS[0]} rows)" if len(self.ways) == 1 else OTHER_GATE)

    def _looks_right(self, mlp: Experts, program: Program, size: float) -> bool:
        given = self._given(ROWS[0], seed=1)
        with mlp.louder(self.experts, size):
            if size not in self.made:
                self.made[size] = tensors_in(_plain(self.call.call(self.block, [each.clone() for each in given])))
            operands = mlp.stacked(*mlp.linears(self.experts))
            got = tensors_in(program.gm(*given, *(self.own[name] for name in program.owned), *operands))
        return all(agrees(*pair) for pair in zip(self.made[size], got, strict=True) if pair[0].is_floating_point())

    def _recorded(self, tokens: int) -> tuple[Tape, Any, list[Tensor]]:
        """A tape with experts that give one-hot rows, what the block returns, and the rows that experts were given."""
        given = self._given(tokens, seed=tokens)
        fed: list[Tensor] = []
        tape = Tape({**dict(zip(self.given, given, strict=True)), **self.own}, watched=tokens * self.mlp.spec.hidden)
        output = self._run_one_hot(tape, given, fed)
        return tape, map_aggregate(_plain(output), tape.slot_of), fed

    def _run_one_hot(self, tape: Tape, given: Sequence[Tensor], fed: list[Tensor]) -> Any:
        """What the block returns with experts that give one-hot rows (a one in the place of the expert)."""
        with self.mlp.one_hot(self.experts, tape, fed) as mode, tape, mode or nullcontext():
            return self.call.call(self.block, given)

    def _sites(self, tape: Tape, fed: Tensor) -> Iterator[ExpertsSite]:
        """Where experts may stand, the last sum first."""
        fed = fed[fed.any(1)].unique(dim=0)  # rows of zeros fill an expert's places that no token has
        tokens, count = TOKENS[0], self.mlp.spec.experts
        fixed = [(Slot(index), value) for index, value in enumerate(tape.values) if Slot(index) not in tape.tainted]
        rows = [(slot, _rows(value, tokens)) for slot, value in fixed if tape.origin[slot.index] is not None]
        x = next((slot for slot, value in rows if value is not None and _holds(value, fed)), None)
        if x is None:
            raise NotProved("its experts are given other rows than those of one tensor with a row for each token")
        ids = [(slot, value) for slot, value in reversed(rows) if value is not None and _are_ids(value, count)]
        weights = [(slot, value) for slot, value in reversed(rows) if value is not None and value.is_floating_point()]
        for step, total, state in reversed(tape.states):
            if state.shape[-1] != self.mlp.spec.hidden:
                continue
            says = state.reshape(tokens, -1)
            if not says.any() or says[:, count:].any():
                continue
            for chosen, of_token in ids:
                if _fits(says, of_token, torch.ones_like(of_token, dtype=says.dtype), count):
                    yield ExpertsSite(x, chosen, None, False, total, step, not bool(_is_expert(of_token, count).all()))
            for (chosen, of_token), (weight, values) in itertools.product(ids, weights):
                some = not bool(_is_expert(of_token, count).all())
                if values.shape == of_token.shape and _fits(says, of_token, values, count):
                    yield ExpertsSite(x, chosen, weight, False, total, step, some)
                elif values.shape[1] == count and _fits(says, of_token, values.gather(1, of_token.clamp(0, count - 1)), count):
                    yield ExpertsSite(x, chosen, weight, True, total, step, some)

    def _check(self, program: Program, tape: Tape) -> None:
        """The block itself beside its program: ragged loads, experts that get nothing, one that gets every token, ties."""
        for tokens in (*ROWS, 1):
            self._compare(program, self._given(tokens, seed=tokens))
        if program.logits is None:
            self._compare_crowd(program)
            return
        index = program.logits[1]
        slot = tape.steps[index].results[0]
        assert slot is not None
        like = tape.values[slot.index]
        for tokens in ROWS:
            for logits in logits_of(tokens, self.mlp.spec.experts):
                self._compare(program, self._given(tokens, seed=tokens + 1), _shaped(logits, like), index)
        self._compare_crowd(program, like, index)

    def _compare_crowd(self, program: Program, like: Tensor | None = None, step: int = -1) -> None:
        """So many tokens for the same experts that any capacity is exceeded which is a number in the block's code. Experts give rows with
        a one in their place, so that this costs no products of theirs."""
        rows = crowd_of(self.block)
        given = self._given(rows, seed=rows)
        for index, each in enumerate(self.call.tensors):
            if not each.dtype.is_floating_point:
                given[index] = given[index].narrow(each.axis, 0, 1).expand_as(given[index]).clone()  # the first row's ids
        logits = None if like is None else _shaped(torch.linspace(8.0, -8.0, self.mlp.spec.experts).repeat(rows, 1), like)
        tape = Tape({}, {} if logits is None else {step: logits.clone()})
        expected = tensors_in(_plain(self._run_one_hot(tape, [each.clone() for each in given], [])))
        self._agree(program, given, logits, expected, one_hot=True)

    def _compare(self, program: Program, given: Sequence[Tensor], logits: Tensor | None = None, step: int = -1) -> None:
        instead: Mapping[int, Tensor] = {} if logits is None else {step: logits.clone()}
        copies = [each.clone() for each in given]
        with Tape({}, instead):
            expected = tensors_in(_plain(self.call.call(self.block, copies)))
        self._agree(program, given, logits, expected)

    def _agree(
        self, program: Program, given: Sequence[Tensor], logits: Tensor | None, expected: list[Tensor], one_hot: bool = False
    ) -> None:
        rows = given[0].shape[self.call.tensors[0].axis]
        tensors = [*(each.clone() for each in given), *(self.own[name] for name in program.owned), *self.operands]
        try:
            got = tensors_in(Evaluation(program, logits, one_hot).run(*tensors))
        except NOT_EXPERTS as error:
            raise NotProved(f"what it does for {TOKENS[0]} rows cannot be done for {rows}: {first_line(error)}") from error
        for one, other in zip(expected, got, strict=True):
            if one.dtype != other.dtype or not (agrees(one, other) if one.is_floating_point() else torch.equal(one, other)):
                raise NotProved(f"{OTHER_NUMBERS} ({rows} rows)")

    def _given(self, tokens: int, seed: int) -> list[Tensor]:
        return given_tensors(self.call, tokens, self.mlp.spec.hidden, self.mlp.spec.experts, self.device, seed)


def refuse_other_branches(tape: Tape, site: ExpertsSite) -> None:
    """Raises NotProved where Python looked at numbers that are made from more than the chosen experts and their weights: a block may branch
    on nothing else, as other branches would be lost."""
    other = _made_from_more(tape, site)
    for name, slots in tape.looked:
        if slots & other:
            raise NotProved(f"it may branch on numbers ({name}) that are not only which experts were chosen, and with which weights")


def _made_from_more(tape: Tape, site: ExpertsSite) -> set[Slot]:
    chosen = tape.values[site.ids.index].flatten()
    same = {Slot(index) for index, value in enumerate(tape.values) if _equal(value, chosen)}
    known = same | {site.weights}
    found = {Slot(index) for index, origin in enumerate(tape.origin) if not isinstance(origin, tuple)} - known
    for step in tape.steps:
        name = getattr(step.function, "__name__", "")
        if not step.given & found or name.startswith("new_") or name.endswith("_like"):
            continue  # new_* and *_like read only shapes and dtypes
        found |= {slot for slot in step.results if slot is not None} - known
        found |= {slot for each in step.written for slot in tape.same_memory(each)} - known
    return found


def _shaped(logits: Tensor, like: Tensor) -> Tensor:
    """Logits [T, E] as those of a tape are shaped."""
    return logits.reshape([len(logits) if size == TOKENS[0] else size for size in like.shape]).to(like)


def _equal(value: Tensor, ids: Tensor) -> bool:
    """Whether these are the ids, on whichever device."""
    return value.dtype == ids.dtype and value.numel() == ids.numel() and torch.equal(value.flatten().to(ids.device), ids)


def _rows(value: Tensor, tokens: int) -> Tensor | None:
    """[T, n] of a tensor with one row for each token; None for others."""
    sizes = list(value.shape)
    while sizes and sizes[0] == 1:
        sizes.pop(0)
    return value.reshape(tokens, -1) if sizes and sizes[0] == tokens and len(sizes) <= 2 else None


def _holds(value: Tensor, fed: Tensor) -> bool:
    """Whether all rows that were given to experts are rows of `value`."""
    if value.shape[1] != fed.shape[1] or value.dtype != fed.dtype:
        return False
    return all(bool((value == row).all(1).any()) for row in fed)


def _are_ids(value: Tensor, experts: int) -> bool:
    """Whether these may be ids of experts, different ones for a token; others (-1) stand for none."""
    if value.dtype != torch.int64 or value.shape[1] > experts:
        return False
    ordered = value.sort(1).values
    same = (ordered[:, 1:] == ordered[:, :-1]) & _is_expert(ordered[:, 1:], experts)
    return bool(_is_expert(value, experts).any()) and not bool(same.any())


def _is_expert(ids: Tensor, experts: int) -> Tensor:
    return (ids >= 0) & (ids < experts)


def _fits(says: Tensor, ids: Tensor, weights: Tensor, experts: int) -> bool:
    """Whether what experts said of themselves, [T, H] with a weight in each expert's place, are these weights, but for rounding."""
    if weights.shape != ids.shape:
        return False
    expected = torch.zeros(says.shape, dtype=torch.float64, device=says.device)
    expected.scatter_add_(1, ids.clamp(0, experts - 1), weights.double() * _is_expert(ids, experts))
    limit = 4 * torch.finfo(says.dtype).eps
    return bool(torch.allclose(says.double(), expected, rtol=limit, atol=limit * 1e-2))


def _plain(output: Any) -> Any:
    """What is returned, if it is tensors, None and numbers in tuples and lists."""
    if isinstance(output, tuple | list) and type(output) in (tuple, list):
        return tuple(_plain(each) for each in output) if isinstance(output, tuple) else [_plain(each) for each in output]
    if output is None or isinstance(output, Tensor | int | float | str):
        return output
    raise NotProved(f"it returns a {type(output).__name__}; known are tensors, alone or in a tuple")


def given_tensors(call: BlockCall, tokens: int, hidden: int, experts: int, device: torch.device, seed: int = 0) -> list[Tensor]:
    """Random ones of a call of so many tokens: integers are ids of experts, different ones for a token, and narrow rows weights."""
    numbers = torch.Generator().manual_seed(seed)
    return [_given(each, tokens, hidden, experts, numbers).to(device, each.dtype) for each in call.tensors]


def _given(each: GivenTensor, tokens: int, hidden: int, experts: int, numbers: torch.Generator) -> Tensor:
    sizes = each.sizes(tokens)
    if each.dtype.is_floating_point:
        return torch.randn(sizes, generator=numbers) if sizes[-1] == hidden else torch.rand(sizes, generator=numbers)
    chances = torch.rand(tokens, experts, generator=numbers)
    chances[:, : experts // 3] *= 0.9  # some are chosen more rarely
    count = torch.Size(sizes).numel() // tokens
    return chances.topk(min(count, experts), dim=1).indices.reshape(sizes if count <= experts else (tokens, -1))


def logits_of(tokens: int, experts: int) -> Iterator[Tensor]:
    """Random ones, equal ones, and such that one expert, or two, get every token and others none; [tokens, experts] in float32."""
    numbers = torch.Generator().manual_seed(tokens)
    for spread in SPREADS:
        yield torch.randn(tokens, experts, generator=numbers) * spread
    yield torch.zeros(tokens, experts)
    for wanted in range(min(experts, 3)):
        crowded = torch.randn(tokens, experts, generator=numbers)
        crowded[:, wanted] += 20.0
        yield crowded
