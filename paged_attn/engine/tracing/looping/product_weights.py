"""Experts whose products a block computes itself, with weights of its own or of parts of it, in whatever loop or gather it does that.

Their weights are stacked tensors [E, n, m] (one for each product), lists of E matrices, or matrices [E n, m] of all experts' rows (DBRX).
Which of them is which is tried by shapes. How the block picks an expert's rows and adds them up does not matter: it is only ever run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paged_attn.attn_ops.replaced_entries import replaced_entries
from paged_attn.attn_ops.specs.experts import ExpertsSpec, Gating
from paged_attn.engine.tracing.experts_as_ops import known_gates
from paged_attn.engine.tracing.experts_layout import DTYPES, Operands, flat_layouts_of, is_stacked
from paged_attn.engine.tracing.looping.one_hot_products import OneHotProducts
from paged_attn.engine.tracing.looping.tape import Tape

LISTS = (nn.ModuleList, nn.ModuleDict)
AROUND = 3  # modules that are tried as the block: the one that holds the weights, and two around it


@dataclass(frozen=True)
class Stack:
    """The same weight of every expert, [E, n, m], or bias [E, n].

    Attributes:
        paths: of the one parameter that has all of them, or of each expert's.
        shape: (n, m), or (n,).
    """

    paths: tuple[str, ...]
    experts: int
    shape: tuple[int, ...]

    def parameters(self, holder: nn.Module) -> list[nn.Parameter]:
        """In the order of the experts."""
        return [holder.get_parameter(path) for path in self.paths]

    def owners(self, holder: nn.Module) -> list[tuple[nn.Module, str]]:
        """The modules that hold them, and their names there."""
        return [(holder.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in self.paths]


@dataclass(frozen=True)
class ProductWeights:
    """What the experts of a block compute, if what stands between their products is `gating`; called as `ExpertMLP`, with one module in
    place of experts: the one that holds the weights.

    Attributes:
        first: the weights of gate and up, or the one of both (or of up, where nothing is gated); `biases` of each, or none.
        second: the weight of the second product; `second_bias`, or none.
        turned: whether weights of the first, and of the second product are [.., in, out], and not [.., out, in].
    """

    first: tuple[Stack, ...]
    second: Stack
    biases: tuple[Stack, ...]
    second_bias: Stack | None
    turned: tuple[bool, bool]
    gating: Gating
    spec: ExpertsSpec

    def linears(self, experts: Sequence[nn.Module]) -> tuple[list[Any], list[Any]]:
        """Who holds what, of the first product and of the second: for each stack, and then for each bias, modules and names."""
        (holder,) = experts
        second = (self.second,) if self.second_bias is None else (self.second, self.second_bias)
        return [stack.owners(holder) for stack in (*self.first, *self.biases)], [stack.owners(holder) for stack in second]

    def stacked(self, first: Sequence[Any], second: Sequence[Any]) -> Operands:
        """w1 [E, n, H], or [E, 2, I, H] with gate and up separate, w2 [E, H, I], and biases [E, n] and [E, H] or None, of `linears`."""
        count = len(self.first)
        w1 = self._matrices(first[:count], self.first, self.turned[0])
        w2 = self._matrices(second[:1], (self.second,), self.turned[1])
        if self.second_bias is None:
            return w1, w2, None, None
        return w1, w2, self._vectors(first[count:], self.biases), self._vectors(second[1:], (self.second_bias,))

    def _matrices(self, owners: Sequence[Any], stacks: Sequence[Stack], turned: bool) -> Tensor:
        experts, shape = self.spec.experts, stacks[0].shape
        if len(stacks[0].paths) == 1:
            weights = [getattr(owner, name) for ((owner, name),) in owners]
            if len(weights) == 1:
                result: Tensor = weights[0].view(experts, *shape)
            else:
                result = torch.cat(weights).view(2, experts, *shape).transpose(0, 1)
        else:
            rows = torch.cat([getattr(owner, name) for together in zip(*owners, strict=True) for owner, name in together])
            result = rows.view(experts, *([len(stacks)] if len(stacks) > 1 and turned else []), -1, shape[1])
        return result.transpose(-1, -2) if turned else result

    def _vectors(self, owners: Sequence[Any], stacks: Sequence[Stack]) -> Tensor:
        if len(stacks[0].paths) == 1:
            (((owner, name),),) = owners
            result: Tensor = getattr(owner, name)
            return result
        return torch.cat([getattr(owner, name) for together in zip(*owners, strict=True) for owner, name in together]).view(
            self.spec.experts, -1
        )

    def columns(self, experts: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
        """The parameters of each operand, in the order in which they lie there."""
        (holder,) = experts
        second = [(self.second,), *([(self.second_bias,)] if self.second_bias else [])]
        groups = [self.first, *([self.biases] if self.biases else []), *second]
        return [[weight for row in zip(*(stack.parameters(holder) for stack in group), strict=True) for weight in row] for group in groups]

    @contextmanager
    def louder(self, experts: Sequence[nn.Module], size: float) -> Iterator[None]:
        """Inside, the block's own first products are so much larger."""
        (holder,) = experts
        with instead([(owner, name, scaled(size)) for stack in (*self.first, *self.biases) for owner, name in stack.owners(holder)]):
            yield

    @contextmanager
    def one_hot(self, experts: Sequence[nn.Module], tape: Tape, fed: list[Tensor]) -> Iterator[TorchFunctionMode]:
        """A mode in which first products note in `fed` what they are given, and second ones give a one in their expert's place."""
        (holder,) = experts
        zero = [] if self.second_bias is None else [(owner, name, torch.zeros_like) for owner, name in self.second_bias.owners(holder)]
        one_hot = [(owner, name, self._one_in_place(index)) for index, (owner, name) in enumerate(self.second.owners(holder))]
        with instead([*one_hot, *zero]):
            firsts = [weight for stack in self.first for weight in stack.parameters(holder)]
            biases = [] if self.second_bias is None else self.second_bias.parameters(holder)
            yield OneHotProducts(firsts, self.second.parameters(holder), biases, self.spec.hidden, tape, fed)

    def _one_in_place(self, index: int) -> Callable[[Tensor], Tensor]:
        alone = len(self.second.paths) == 1

        def made(weight: Tensor) -> Tensor:
            result = torch.zeros_like(weight)
            matrices = result.view(-1, *self.second.shape)
            for place, matrix in enumerate(matrices):
                (matrix.t() if self.turned[1] else matrix)[place if alone else index, 0] = 1.0
            return result

        return made


def scaled(size: float) -> Callable[[Tensor], Tensor]:
    """A change of a weight for `instead`."""
    return lambda weight: weight * size


@contextmanager
def instead(changes: Sequence[tuple[nn.Module, str, Callable[[Tensor], Tensor]]]) -> Iterator[None]:
    """Inside, these parameters of modules are what the functions make of them."""
    with ExitStack() as undo:
        for owner, name, change in changes:
            weight = owner.get_parameter(name).detach()
            undo.enter_context(replaced_entries(owner._parameters, {name: nn.Parameter(change(weight), requires_grad=False)}))
        yield


def product_weights(holder: nn.Module, widths: set[int]) -> Iterator[list[ProductWeights]]:
    """What the weights within a module may be, by their shapes: for each way the same with every known gate.

    Args:
        widths: of the rows that its block is given.
    """
    for first, second, biases, second_bias, turned in _roles(holder):
        (n, hidden), (given, inner) = (
            stack.shape[::-1] if back else stack.shape for stack, back in zip((first[0], second), turned, strict=True)
        )
        wide = n * len(first)
        if given != hidden or hidden not in widths or wide not in ((2 * inner,) if len(first) > 1 else (inner, 2 * inner)):
            continue
        if second_bias is not None and (any(bias.shape != (n,) for bias in biases) or second_bias.shape != (hidden,)):
            continue
        apart = len(first) > 1 and len(first[0].paths) == 1
        if apart and biases:
            continue
        spec = ExpertsSpec(second.experts, hidden, inner, has_bias=second_bias is not None)
        yield [
            ProductWeights(first, second, biases, second_bias, turned, gate, replace(spec, gating=gate))
            for gate in known_gates(holder, wide == 2 * inner)
            if len(first) == 1 or not (gate.interleaved or gate.up_first)
        ]


TURNED = ((False, False), (False, True), (True, False), (True, True))
Roles = tuple[tuple[Stack, ...], Stack, tuple[Stack, ...], Stack | None, tuple[bool, bool]]


def _roles(holder: nn.Module) -> Iterator[Roles]:
    """What may be the first products' weights and the second's, their biases, and which are turned."""
    for matrices, biases in _stacks(holder):
        for second in reversed(matrices):  # usually the last one
            others = [stack for stack in matrices if stack is not second]
            if len({stack.shape for stack in others}) > 1:
                continue
            for turned, first in itertools.product(TURNED, itertools.permutations(others)):
                if not biases:
                    yield first, second, (), None, turned
                else:
                    of = dict(zip(matrices, biases, strict=True))
                    yield first, second, tuple(of[stack] for stack in first), of[second], turned
    for layout in flat_layouts_of(holder):
        shapes = {path: holder.get_parameter(path).shape for path in (*layout.first, layout.second)}
        stacks = {path: Stack((path,), layout.experts, (rows // layout.experts, columns)) for path, (rows, columns) in shapes.items()}
        for paths in itertools.permutations(layout.first):
            yield tuple(stacks[path] for path in paths), stacks[layout.second], (), None, (False, layout.transposed)


def may_hold_experts(module: nn.Module) -> bool:
    """Whether it, or its children, have two or three weights of each of some experts."""
    return any(True for _ in _stacks(module)) or bool(flat_layouts_of(module))


def _stacks(module: nn.Module) -> Iterator[tuple[list[Stack], list[Stack]]]:
    """Two or three weights of all experts, and their biases or none, in the same order."""
    near = [("", module), *((f"{name}.", child) for name, child in module.named_children())]
    own = [(path, part) for path, part in near if not type(part).__module__.startswith("torch.nn")]  # a convolution's has three dims, too
    owned = {f"{path}{name}": weight for path, part in own for name, weight in part._parameters.items() if weight is not None}
    whole = {path: weight for path, weight in owned.items() if is_stacked(weight)}
    if len(whole) in (2, 3) and len({len(weight) for weight in whole.values()}) == 1:
        matrices = [Stack((path,), len(weight), tuple(weight.shape[1:])) for path, weight in whole.items()]
        count = matrices[0].experts
        rows = {path: weight for path, weight in owned.items() if "bias" in path and weight.dim() == 2 and len(weight) == count}
        if not rows:
            yield matrices, []
        elif len(rows) == len(whole):
            for order in itertools.permutations(Stack((path,), count, tuple(weight.shape[1:])) for path, weight in rows.items()):
                yield matrices, list(order)
    lists = [(path, part) for path, part in near if isinstance(part, LISTS)]
    single: list[tuple[list[Stack], list[Stack]]] = []
    for path, experts in lists:
        if (found := _in_list(path, experts)) is None:
            continue
        if len(found[0]) > 1:
            yield found
        else:
            single.append(found)
    if (
        len(single) in (2, 3)
        and len({matrices[0].experts for matrices, _ in single}) == 1
        and len({len(biases) for _, biases in single}) == 1
    ):
        yield [stack for matrices, _ in single for stack in matrices], [stack for _, biases in single for stack in biases]


def _in_list(path: str, experts: nn.Module) -> tuple[list[Stack], list[Stack]] | None:
    """One to three matrices of each module of a list, and biases of all of them or of none; None if they hold anything else."""
    names, modules = [*experts._modules], [*experts.children()]
    shapes = [{name: tuple(weight.shape) for name, weight in module.named_parameters()} for module in modules]
    if len(modules) < 2 or len(modules) < len(names) or any(each != shapes[0] for each in shapes):
        return None
    if any(type(weight) is not nn.Parameter or weight.dtype not in DTYPES for weight in experts.parameters()):
        return None
    stacks = {name: Stack(tuple(f"{path}{number}.{name}" for number in names), len(names), shape) for name, shape in shapes[0].items()}
    matrices = {name.rpartition(".")[0]: stack for name, stack in stacks.items() if len(stack.shape) == 2}
    biases = {name.rpartition(".")[0]: stack for name, stack in stacks.items() if len(stack.shape) == 1}
    if len(matrices) not in (1, 2, 3) or len(matrices) + len(biases) != len(stacks) or (biases and biases.keys() != matrices.keys()):
        return None
    return [*matrices.values()], [biases[name] for name in matrices if biases]


def holders_in(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """For each innermost module that may hold experts' weights, itself and the modules around it, the innermost first, with their paths."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if not name or type(module) in LISTS or not may_hold_experts(module):
            continue
        if any(may_hold_experts(child) for child in module.children() if type(child) not in LISTS):
            continue
        around = [name.rsplit(".", cut)[0] for cut in range(min(AROUND, name.count(".") + 1))]
        yield [(path, modules[path]) for path in dict.fromkeys(around) if type(modules[path]) not in LISTS]
