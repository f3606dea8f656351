"""Modules of experts, as transformers lays them out, become one op each while a model is traced.

Since transformers 5 such a module holds its experts' weights stacked, says how (`is_transposed`, `has_bias`, ...), and is given the hidden
states, the chosen experts and their weights. What it computes is not read off that: its gate is tried on numbers, and the module itself is
run beside the op.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.specs.experts import ACTIVATIONS, ExpertsSpec, Gating
from paged_attn.backends.devices import architecture_of, device_word
from paged_attn.backends.experts.base import ExpertsProblem
from paged_attn.backends.selection.experts import ExpertsSelection, select_experts
from paged_attn.calling.replaced_forward import replaced_forward

logger = logging.getLogger("paged_attn")
FLAGS = ("has_gate", "has_bias", "is_transposed")
OTHER_KINDS = ("has_post_expert_norm", "_is_expert_parallel")  # newer than transformers 5.17
ROWS = 24  # of a proof, beside the number of experts
ALLOWED = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 0.03, torch.float16: 0.004}  # of a row's length


@contextmanager
def experts_as_ops(model: nn.Module, backend: str = "auto") -> Iterator[int]:
    """Inside, while torch.compile traces, every module of experts that is proved is one op; the value is how many there are.

    Raises:
        ValueError: `backend` is unknown.
        UnsupportedError: it can not compute a layer of this model.
    """
    with ExitStack() as undo:
        proved: dict[tuple[Any, ...], ProvedExperts | None] = {}
        count = 0
        for name, module in model.named_modules():
            if not is_experts(module):
                continue
            key = _kind(module)
            if key not in proved:
                found = proved[key] = proved_experts(module, backend)
                what = "stays as it is" if found is None else f"is one op: {found.gating.describe()}, by {found.backend.describe()}"
                logger.info("%s (%s) %s", name, type(module).__name__, what)
            if (found := proved[key]) is not None:
                undo.enter_context(replaced_forward(module, _emitter(module, found)))
                count += 1
        yield count


def is_experts(module: nn.Module) -> bool:
    """Whether the module is laid out as transformers' experts are, whole and on this rank."""
    if not all(hasattr(module, flag) for flag in FLAGS) or any(getattr(module, kind, False) for kind in OTHER_KINDS):
        return False
    weights = [getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None), getattr(module, "down_proj", None)]
    return all(type(weight) is nn.Parameter and weight.dim() == 3 and weight.is_floating_point() for weight in weights)


def operands(module: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """w1 [E, 2 I, H] and w2 [E, H, I] as views of the module's weights, and their biases."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    w1, w2 = getattr(module, first), module.down_proj
    if module.is_transposed:
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    return w1, w2, getattr(module, f"{first}_bias") if module.has_bias else None, module.down_proj_bias if module.has_bias else None


@dataclass(frozen=True)
class ProvedExperts:
    """What a module does between its products, and which backend gives its numbers."""

    gating: Gating
    backend: ExpertsSelection


def proved_experts(module: Any, backend: str = "auto") -> ProvedExperts | None:
    """What the op must be called with to give the module's numbers; None if nothing that is known does."""
    with torch.no_grad():
        for gating in _fitting_gates(module):
            found = ProvedExperts(gating, select_experts(backend, _problem(module, gating)))
            if _computes_the_same(module, found):
                return found
    return None


def _problem(module: Any, gating: Gating) -> ExpertsProblem:
    w1, w2, b1, _ = operands(module)
    spec = ExpertsSpec(w1.shape[0], w1.shape[2], w2.shape[2], gating, b1 is not None)
    return ExpertsProblem(spec, w1.dtype, device_word(w1.device), architecture_of(w1.device))


def _fitting_gates(module: Any) -> Iterator[Gating]:
    w1, w2, *_ = operands(module)
    if w1.shape[1] != (1 + module.has_gate) * w2.shape[2] or w1.shape[2] != w2.shape[1]:
        return
    numbers = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.5, 3.0, 30.0]).repeat(8)[:, None]  # beyond any limit, too
    first = (torch.randn(24, w1.shape[1], generator=numbers) * sizes).to(w1.device, w1.dtype)
    expected = (module._apply_gate if module.has_gate else module.act_fn)(first.clone())
    for gating in _known(module):
        if _apart(expected, gating(first)) <= ALLOWED.get(w1.dtype, 0.0):
            yield gating


def _known(module: Any) -> Iterator[Gating]:
    if not module.has_gate:
        yield from (Gating(name, gated=False) for name in ACTIVATIONS)
        return
    limits = {0.0} | {float(v) for name in ("limit", "swiglu_limit") if isinstance(v := getattr(module, name, None), int | float)}
    alphas = {float(v) for name in ("alpha", "swiglu_alpha") if isinstance(v := getattr(module, name, None), int | float)}
    for limit in limits:
        for interleaved in (False, True):
            yield from (Gating(name, True, interleaved, limit) for name in ACTIVATIONS)
            yield from (Gating("silu", True, interleaved, limit, alpha) for alpha in alphas)


def _computes_the_same(module: Any, found: ProvedExperts) -> bool:
    """On ragged loads, with experts that get nothing, and with one that gets every token; by the op, with what will compute it."""
    w1, w2, b1, b2 = operands(module)
    experts, hidden, device = w1.shape[0], w1.shape[2], w1.device
    numbers = torch.Generator().manual_seed(1)
    k = min(experts, 4)
    for rows, most in ((ROWS, experts), (3, experts), (ROWS, 1)):
        x = torch.randn(rows, hidden, generator=numbers).to(device, w1.dtype)
        chosen = torch.rand(rows, experts, generator=numbers)
        chosen[:, : experts // 3] *= 0.9  # some are chosen more rarely
        ids = chosen.topk(k, dim=1).indices if most > 1 else torch.zeros(rows, 1, dtype=torch.int64)
        weights = torch.rand(ids.shape, generator=numbers).to(device, w1.dtype)
        ids = ids.to(device)
        expected = module(x.clone(), ids.clone(), weights.clone())
        if _apart(expected, _call(found, x, ids, weights, w1, w2, b1, b2)) > ALLOWED.get(w1.dtype, 0.0):
            return False
    return True


def _apart(expected: Tensor, given: Tensor) -> float:
    """The largest error of a row, of the row's length; inf for other shapes and for what is not finite."""
    if expected.shape != given.shape:
        return float("inf")
    expected, given = expected.double(), given.double()
    error = ((expected - given).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)).max().item()
    return error if error == error else float("inf")


def _emitter(module: Any, found: ProvedExperts) -> Callable[..., Tensor]:
    original = module.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = [*args, *kwargs.values()]
        if not torch.compiler.is_compiling() or len(given) != 2:
            result: Tensor = original(hidden_states, *args, **kwargs)
            return result
        ids, weights = given if not given[0].is_floating_point() else reversed(given)
        w1, w2, b1, b2 = operands(module)
        return _call(found, hidden_states, ids, weights, w1, w2, b1, b2)

    return forward


def _call(found: ProvedExperts, *tensors: Tensor | None) -> Tensor:
    """The op, of tensors."""
    gating = found.gating
    between = (gating.activation, gating.gated, gating.interleaved, gating.limit, gating.alpha)
    result: Tensor = EXPERTS(*tensors, *between, found.backend.name)
    return result


def _kind(module: Any) -> tuple[Any, ...]:
    """What makes two modules compute the same apart from their weights, as far as can be said without running them."""
    numbers = tuple(sorted((name, value) for name, value in vars(module).items() if isinstance(value, bool | int | float | str)))
    w1, w2, *_ = operands(module)
    return type(module), numbers, repr(getattr(module, "act_fn", None)), tuple(w1.shape), tuple(w2.shape), w1.dtype
