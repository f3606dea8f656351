"""What one expert of a list computes: its linear layers, found by shapes, and the gate between them, tried on numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_attn.attn_ops.specs.experts import ExpertsSpec, Gating
from paged_attn.calling.left_as_it_was import replaced_forward
from paged_attn.engine.tracing.experts_as_ops import NOT_EXPERTS, agrees, known_gates
from paged_attn.engine.tracing.experts_layout import Operands
from paged_attn.engine.tracing.looping.calls import NotProved
from paged_attn.engine.tracing.looping.product_weights import instead, scaled
from paged_attn.engine.tracing.looping.tape import Tape

SIZES = (0.3, 1.0, 3.0, 10.0)  # scales of the activation's input
ROWS = 24  # in each proof


@dataclass(frozen=True)
class ExpertMLP:
    """What each expert of a list computes.

    Attributes:
        first: paths of the linear layers that take the token, in the order in which their rows make w1: gate and up, or both in one.
        second: path of the one that gives what the expert gives.
    """

    first: tuple[str, ...]
    second: str
    gating: Gating
    spec: ExpertsSpec

    def linears(self, experts: Sequence[nn.Module]) -> tuple[list[Any], list[Any]]:
        """The linear layers of both products, in the order in which their rows lie stacked."""
        first = [expert.get_submodule(path) for expert in experts for path in self.first]
        return first, [expert.get_submodule(self.second) for expert in experts]

    def stacked(self, first: Sequence[Any], second: Sequence[Any]) -> Operands:
        """w1 [E, 2 I, H] (I without a gate), w2 [E, H, I], b1 [E, 2 I] and b2 [E, H] or None, of `linears`: a copy."""
        count, hidden, inner = self.spec.experts, self.spec.hidden, self.spec.inner
        rows = 2 * inner if self.gating.gated else inner
        w1 = torch.cat([linear.weight for linear in first]).view(count, rows, hidden)
        w2 = torch.cat([linear.weight for linear in second]).view(count, hidden, inner)
        if not self.spec.has_bias:
            return w1, w2, None, None
        b1, b2 = torch.cat([linear.bias for linear in first]), torch.cat([linear.bias for linear in second])
        return w1, w2, b1.view(count, rows), b2.view(count, hidden)

    def columns(self, experts: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
        """The parameters of each operand, in the order in which they lie there."""
        names = ("weight", "bias") if self.spec.has_bias else ("weight",)
        return [[getattr(linear, name) for linear in column] for name in names for column in self.linears(experts)]

    @contextmanager
    def louder(self, experts: Sequence[nn.Module], size: float) -> Iterator[None]:
        """Inside, first products are so much larger."""
        first, _ = self.linears(experts)
        with instead([(linear, name, scaled(size)) for linear in first for name, _ in linear.named_parameters()]):
            yield

    @contextmanager
    def one_hot(self, experts: Sequence[nn.Module], tape: Tape, fed: list[Tensor]) -> Iterator[None]:
        """Inside, experts note in `fed` what they are given, and give one-hot rows, with a one in their place."""
        hidden = self.spec.hidden

        def one_hot_expert(expert: int) -> Callable[[Tensor], Tensor]:
            def forward(rows: Tensor) -> Tensor:
                with tape.expert() as taken:
                    fed.append(rows.detach().reshape(-1, hidden).clone())
                    result = rows.new_zeros((*rows.shape[:-1], hidden))
                    result[..., expert] = 1.0
                    return taken(result)

            return forward

        with ExitStack() as undo:
            for index, expert in enumerate(experts):
                undo.enter_context(replaced_forward(expert, one_hot_expert(index)))
            yield


def expert_mlps(experts: Sequence[nn.Module]) -> list[ExpertMLP]:
    """What experts that are built alike compute, tried on the first of them: with gate first, then with up first.

    It is given random weights in float32 on the CPU, where no setting rounds products.

    Raises:
        NotProved: they are no such experts.
    """
    expert = experts[0]
    linears = {name: module for name, module in expert.named_modules() if type(module) is nn.Linear}
    owned = {f"{name}.{each}" for name, linear in linears.items() for each, _ in linear.named_parameters()}
    tensors = {name for name, _ in [*expert.named_parameters(), *expert.named_buffers()]}
    if len(linears) not in (2, 3) or "" in linears or owned != tensors:
        raise NotProved(
            f"its experts ({type(expert).__name__}) have {len(linears)} linear layers and besides {sorted(tensors - owned) or 'nothing'}; "
            "known are two or three layers, and nothing besides"
        )
    if len({linear.bias is None for linear in linears.values()}) > 1:
        raise NotProved(f"some linear layers of its experts ({type(expert).__name__}) have a bias and some have none")
    dtype = torch.float64 if next(expert.parameters()).dtype == torch.float64 else torch.float32
    weights = _random_weights(expert, dtype)
    has_bias = any(name.endswith("bias") for name in weights)
    found: list[ExpertMLP] = []
    for first, second in _orders(linears):
        wide, (hidden, inner) = sum(linears[name].out_features for name in first), linears[second].weight.shape
        if found and hidden != found[0].spec.hidden:
            continue  # the other way round
        given = _given(hidden, dtype)
        try:
            expected = torch.func.functional_call(expert, weights, (given.clone(),))
        except NOT_EXPERTS as error:
            raise NotProved(f"its experts ({type(expert).__name__}) cannot be called on rows: {error}") from error
        if not isinstance(expected, Tensor) or expected.shape != given.shape:
            raise NotProved(f"its experts ({type(expert).__name__}) do not give one row for each that they are given")
        made = torch.cat([F.linear(given, weights[f"{name}.weight"], weights.get(f"{name}.bias")) for name in first], dim=-1)
        for gating in known_gates(expert, wide == 2 * inner):
            inside = gating(made)
            if agrees(expected, F.linear(inside, weights[f"{second}.weight"], weights.get(f"{second}.bias"))):
                found.append(ExpertMLP(first, second, gating, ExpertsSpec(len(experts), hidden, inner, gating, has_bias)))
                break
    if not found:
        raise NotProved(f"its experts ({type(expert).__name__}) compute nothing that is known of {', '.join(linears)}")
    return sorted(found, key=lambda mlp: mlp.gating.up_first)


def _orders(linears: dict[str, nn.Linear]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Which may be the first and which the second product, by shapes."""
    for *first, second in itertools.permutations(linears):
        last = linears[second]
        widths = [linears[name].out_features for name in first]
        fits = all(linears[name].in_features == last.out_features for name in first)
        if fits and (len(set(widths)) == 1 and sum(widths) in (last.in_features, 2 * last.in_features)):
            yield tuple(first), second


def _random_weights(expert: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(weight.shape, generator=numbers, dtype=dtype) / weight.shape[-1] ** 0.5
        for name, weight in expert.named_parameters()
    }


def _given(hidden: int, dtype: torch.dtype) -> Tensor:
    numbers = torch.Generator().manual_seed(1)
    sizes = torch.tensor(SIZES, dtype=dtype).repeat(ROWS // len(SIZES))[:, None]
    return torch.randn(ROWS, hidden, generator=numbers, dtype=dtype) * sizes
