"""Turns each expert module into one op while a model is traced.

Such a module holds its experts' weights stacked, and is given the hidden states, the chosen experts and their weights. What it computes is
found on numbers: gates are tried, and the op's results are compared with those of the module itself.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.specs.experts import ACTIVATIONS, ExpertsSpec, Gating
from paged_attn.backends.experts.base import ExpertsProblem
from paged_attn.backends.selection.experts import ExpertsSelection, select_experts
from paged_attn.calling.left_as_it_was import replaced_forward
from paged_attn.compiled.experts_ahead import compile_experts_ahead
from paged_attn.engine.tracing.experts_layout import FlatLayout, Layout, MovableWeights, Operands, layouts_of
from paged_attn.parallel.own_experts import OwnExperts, WholeExperts, own_experts
from paged_attn.passes.fx.row_layout import MISFITS
from paged_attn.passes.recompute.code_numbers import crowd_of

logger = logging.getLogger("paged_attn")
NOT_EXPERTS = (*MISFITS, AssertionError, AttributeError, KeyError)  # errors from a module that takes other arguments
ROWS = 24  # in each proof, plus one per expert
LOUD = {torch.float32: 30.0, torch.float16: 10.0}  # products in a probe; in float16 those of gate and up must not overflow
ALPHA = 1.702  # of gates whose module does not name it (gpt-oss)
CHOSEN = 4  # experts per token, if the model does not say
ALLOWED = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 0.03, torch.float16: 0.004}  # error relative to the norm of the row


@contextmanager
def experts_as_ops(model: nn.Module, backend: str = "auto") -> Iterator[int]:
    """Inside, while torch.compile traces, every module of experts that is proved is one op; the value is how many there are.

    Raises:
        ValueError: `backend` is unknown.
        UnsupportedError: it cannot compute a layer of this model.
    """
    with ExitStack() as undo:
        proved: dict[tuple[Any, ...], ProvedExperts | None] = {}
        movable = functools.cache(lambda: MovableWeights(model))  # most models' experts stay where they are
        count = 0
        for name, module in model.named_modules():
            if not is_experts(module):
                continue
            key = kind_of(module)
            if key not in proved:
                found = proved[key] = proved_experts(module, backend)
                what = "stays as it is" if found is None else f"is one op: {found.gating.describe()}, by {found.backend.describe()}"
                logger.info("%s (%s) %s", name, type(module).__name__, what)
            if (found := proved[key]) is None:
                continue
            moved = found.layout.moved(module)
            if not moved or _may_move(movable(), name, moved):
                owner = _owner(module)
                undo.enter_context(replaced_forward(owner, _emitter(module, owner.forward, found)))
                count += 1
        yield count


def _may_move(movable: MovableWeights, name: str, weights: list[Any]) -> bool:
    if reason := movable.other_kind(weights) or movable.shared([weights]):
        logger.info("%s stays as it is: %s", name, reason)
    return not reason


def is_experts(module: nn.Module) -> bool:
    """Whether the module may be one of experts: it holds stacked weights, on this rank."""
    return bool(layouts_of(module))


def _owner(module: nn.Module) -> nn.Module | OwnExperts:
    """Whose `forward` computes this rank's experts, which are added up outside where other ranks have some, too."""
    return own_experts(module) or module


@dataclass(frozen=True)
class ProvedExperts:
    """Where a module has its weights, what it does between its products, and which backend gives its numbers.

    Attributes:
        identity: ids beyond the experts stand for the token itself, times its weight (LongCat), and not for nothing.
        dims: of the hidden states that the module takes: [T, H], or [1, T, H].
    """

    layout: Layout | FlatLayout
    gating: Gating
    identity: bool
    backend: ExpertsSelection
    dims: int = 2

    def __call__(self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The op, of x [T, H], and ids and weights [T, k]."""
        return self.of(self.layout.operands(module), x, ids, weights)

    def of(self, operands: Operands, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same of the layout's operands."""
        result: Tensor = EXPERTS(x, ids, weights, *operands, *self.gating.arguments, self.backend.name)
        if self.identity:
            result = result + x * (weights * (ids >= self.layout.experts)).sum(-1, keepdim=True).to(x.dtype)
        return result


def proved_experts(module: Any, backend: str = "auto") -> ProvedExperts | None:
    """What the op must be called with to give the module's numbers; None if nothing that is known does."""
    with torch.no_grad():
        for layout in layouts_of(module):
            operands = layout.operands(module)
            probes: list[Probe] | None = None
            dims = 2
            w1, w2, b1, _ = operands
            for gating in _fitting_gates(module, operands):
                spec = ExpertsSpec(w1.shape[0], w1.shape[-1], w2.shape[2], gating, b1 is not None)
                selection = select_experts(backend, ExpertsProblem.of(spec, w1, w2))
                if probes is None:
                    _compile_ahead(module, operands, gating, selection.name)
                    dims, probes = next(((n, given) for n in (2, 3) if (given := _probes(module, layout, operands[0], n))), (2, []))
                for identity in (False, True) if _num_ids(module, layout) > layout.experts else (False,):
                    found = ProvedExperts(layout, gating, identity, selection, dims)
                    if probes and all(_gives(found, operands, *probe) for probe in probes):
                        return found
    return None


def _compile_ahead(module: nn.Module, operands: Operands, gating: Gating, backend: str) -> None:
    """The kernels that the op will need if the module is what it seems to be, while it is proved and traced."""
    top_k = _chosen(module, len(operands[0]))
    x = operands[0].new_empty(0, operands[0].shape[-1])
    compile_experts_ahead(backend, x, x.new_empty(0, top_k, dtype=torch.int64), x.new_empty(0, top_k), *operands, gating)


def _chosen(module: nn.Module, most: int) -> int:
    """How many experts a token of a probe gets: any number is right, and with the model's own fewer kernels are compiled."""
    told = getattr(getattr(module, "config", None), "num_experts_per_tok", CHOSEN)
    return max(1, min(told if isinstance(told, int) else CHOSEN, most))


def _fitting_gates(module: Any, operands: Operands) -> Iterator[Gating]:
    """All that are known, or, where the module has a function for it, those that give the function's numbers beyond any limit, too."""
    w1, w2, *_ = operands
    wide = w1[0, ..., 0].numel()
    gated = wide == 2 * w2.shape[2]
    if (not gated and wide != w2.shape[2]) or w1.shape[-1] != w2.shape[1]:
        return
    numbers = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.5, 3.0, 30.0]).repeat(8)[:, None]
    both = (torch.randn(24, wide, generator=numbers) * sizes).to(w1.device)
    function = getattr(module, "_apply_gate" if gated else "act_fn", None)
    expected = None if function is None else _numbers_of(function, both, w1.dtype)
    for gating in known_gates(module, gated):
        if gating.interleaved and w1.dim() == 4:
            continue  # gate and up are separate
        if function is None or (expected is not None and agrees(expected, gating(both.to(expected.dtype)))):
            yield gating


def _numbers_of(function: Callable[[Tensor], Tensor], given: Tensor, dtype: torch.dtype) -> Tensor | None:
    """In float32, where 16 bits could not tell activations apart that differ a little; in the module's own type if it takes no other."""
    for each in (torch.float32, dtype):
        try:
            return function(given.to(each, copy=True))
        except MISFITS:
            continue
    return None


def known_gates(module: Any, gated: bool) -> Iterator[Gating]:
    """Every gate that is tried, with the limits and factors that a module names."""
    if not gated:
        yield from (Gating(name, gated=False) for name in ACTIVATIONS)
        return
    limits = {0.0} | {float(v) for name in ("limit", "swiglu_limit") if isinstance(v := getattr(module, name, None), int | float)}
    alphas = {ALPHA} | {float(v) for name in ("alpha", "swiglu_alpha") if isinstance(v := getattr(module, name, None), int | float)}
    softcaps = [0.0, *_softcaps(module)]
    for limit, up_first, interleaved in itertools.product(limits, (False, True), (False, True)):
        known = [Gating(name, True, interleaved, limit) for name in ACTIVATIONS]
        known += [Gating("silu", True, interleaved, limit, alpha) for alpha in alphas]
        pairs = (pair for pair in itertools.product(softcaps, repeat=2) if any(pair))
        known += [Gating("silu", True, interleaved, limit, gate_softcap=gate, up_softcap=up) for gate, up in pairs]
        yield from (replace(gating, up_first=up_first) for gating in known)


def _softcaps(module: nn.Module) -> list[float]:
    numbers = ((name, value) for part in module.modules() for name, value in vars(part).items() if isinstance(value, int | float))
    return sorted({float(value) for name, value in numbers if "softcap" in name and value > 0})


Probe = tuple[tuple[Tensor, Tensor, Tensor], Tensor]  # x, ids and weights, and what the module makes of them


def _probes(module: nn.Module, layout: Layout | FlatLayout, w1: Tensor, dims: int) -> list[Probe]:
    """Inputs on which a module is compared with the op, and what the module gives; none for a module that does not take them.

    Ragged loads, with experts that get nothing; ids beyond the experts, where there are such; two experts that get every token; rows so
    large that a gate meets any limit; and so many rows for the same experts that they meet any capacity.
    """
    experts, hidden, device = layout.experts, w1.shape[-1], w1.device
    numbers = torch.Generator().manual_seed(1)
    compute = owner.forward if isinstance(owner := _owner(module), OwnExperts) else module
    found: list[Probe] = []
    loads = ((ROWS, experts, 0, 1.0), (3, experts, 0, 1.0), (ROWS, _num_ids(module, layout), 0, 1.0), (ROWS, experts, 2, 1.0))
    crowd = (crowd_of(module), experts, _chosen(module, experts), 1.0)
    for rows, count, crowded, size in (*loads, (ROWS, experts, 0, loud(w1)), crowd):
        x = (torch.randn(rows, hidden, generator=numbers) * size).to(device, w1.dtype)
        chosen = torch.rand(rows, count, generator=numbers)
        chosen[:, : count // 3] *= 0.9  # some are chosen more rarely
        chosen[:, :crowded] += 1
        ids = chosen.topk(min(count, _chosen(module, experts)), dim=1).indices
        weights = torch.rand(ids.shape, generator=numbers).to(device, w1.dtype)
        ids = ids.to(device)
        given = x.clone().view(*(1,) * (dims - 2), *x.shape)
        try:
            expected = compute(given, ids.clone(), weights.clone())
        except NOT_EXPERTS:
            return []
        if not isinstance(expected, Tensor) or expected.shape != given.shape:
            return []
        found.append(((x, ids, weights), expected.reshape(x.shape)))
    return found


def _gives(found: ProvedExperts, operands: Operands, given: tuple[Tensor, Tensor, Tensor], expected: Tensor) -> bool:
    """Whether the op gives what the module does, but for rounding. Where few channels are much larger than all others, as training leaves
    some, the terms of a row may cancel out; it is measured by their usual lengths then."""
    got = found.of(operands, *given)
    if agrees(expected, got):
        return True
    off = (expected.double() - got.double()).norm(dim=-1)
    numbers = torch.finfo(expected.dtype)
    least = numbers.smallest_normal * numbers.eps * expected.shape[-1] ** 0.5  # the step between the numbers next to zero, in every element
    return bool((off <= least + ALLOWED.get(expected.dtype, 0.0) * _lengths_of_terms(found, operands, *given)).all())


def _lengths_of_terms(found: ProvedExperts, operands: Operands, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """How long each row of the op would be, [T] float64, if its experts' results stood at right angles and each had its usual length."""
    squares = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for expert in ids[ids < len(operands[0])].unique().tolist():
        alone = found.of(operands, x, torch.full_like(ids[:, :1], expert), torch.ones_like(weights[:, :1]))
        squares += (weights.double() * (ids == expert)).pow(2).sum(-1) * alone.double().pow(2).sum(-1).mean()
    return squares.sqrt()


def loud(w1: Tensor) -> float:
    """How large rows must be so that limits on a gate (7 in gpt-oss, 10 in DeepSeek-V4) show in products with w1 [E, .., H].

    The expert with the largest weights decides: another one's may be a hundred times smaller, and the largest must not overflow.
    """
    wide = torch.promote_types(w1.dtype, torch.float32)  # expert by expert: on a CPU the norm makes a copy of all that it is given
    squares = [torch.linalg.vector_norm(expert, dim=-1, dtype=wide).pow(2).mean() for expert in w1]
    usual = torch.stack(squares).max().sqrt().item()
    return max(1.0, LOUD.get(w1.dtype, max(LOUD.values())) / usual) if usual > 0 else 1.0


def _num_ids(module: nn.Module, layout: Layout | FlatLayout) -> int:
    """How many ids there are: of experts, also of other ranks, and those that a weight has a row for beyond them."""
    if isinstance(owner := _owner(module), WholeExperts):
        return owner.total
    return layout.num_ids(module)


def agrees(expected: Tensor, given: Tensor) -> bool:
    """Whether no row is off by more than rounding may do; never with another shape, or where something is not finite."""
    if expected.shape != given.shape:
        return False
    allowed, expected, given = ALLOWED.get(expected.dtype, 0.0), expected.double(), given.double()
    return bool(((expected - given).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30) <= allowed).all())


def _emitter(module: nn.Module, original: Callable[..., Tensor], found: ProvedExperts) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = [*args, *kwargs.values()]
        many = hidden_states.dim() == 3 and hidden_states.shape[0] != 1
        if not torch.compiler.is_compiling() or len(given) != 2 or hidden_states.dim() != found.dims or many:
            result: Tensor = original(hidden_states, *args, **kwargs)
            return result
        ids, weights = given if not given[0].is_floating_point() else reversed(given)
        if found.dims == 2:
            return found(module, hidden_states, ids, weights)
        return found(module, hidden_states.flatten(0, 1), ids, weights).view(hidden_states.shape)

    return forward


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """What makes two modules compute the same apart from their weights, as far as can be said without running them."""
    attributes = ((path, name, value) for path, part in module.named_modules() for name, value in vars(part).items())
    numbers = tuple(sorted(each for each in attributes if isinstance(each[2], bool | int | float | str)))
    weights = tuple((name, tuple(weight.shape), weight.dtype) for name, weight in module.named_parameters())
    kinds = tuple(type(part) for part in module.modules())
    return kinds, numbers, repr(getattr(module, "act_fn", None)), weights
