"""A program with other weights. A table of places may hold one number for as many tokens as are tried, and others behind them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from paged_attn.attn_ops.ops.module import MODULE_ON_ALL_TOKENS, call_of, module_of, register_module
from paged_attn.attn_ops.specs.recompute import RowInput
from paged_attn.passes.recompute.program import Program
from paged_attn.passes.recompute.reach import reach_of


def tensors_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Their parameters and buffers, and attributes that are tensors, also of the modules inside them."""
    holders = [held for module in modules for part in module.modules() for held in (vars(part), part._parameters, part._buffers)]
    return [value for held in holders for value in held.values() if isinstance(value, Tensor)]


class OtherWeights:
    """A program with copies of the modules that it runs unchanged; their floating-point numbers, and those of its operands, are others."""

    def __init__(self, program: Program) -> None:
        graph = fx.Graph()
        graph.output(graph.graph_copy(program.graph, {}))
        self._modules = list[nn.Module]()  # no graph keeps them alive
        for node in graph.nodes:
            if node.target is MODULE_ON_ALL_TOKENS:
                inputs, like, number = node.args
                self._modules.append(_copied(module_of(number), {}))
                node.args = (inputs, like, register_module(self._modules[-1], call_of(number)))
        self._run = fx.GraphModule({}, graph)

    def __call__(self, length: int, rows: Sequence[Tensor], owned: Sequence[Tensor]) -> Tensor:
        result: Tensor = self._run.forward(length, *rows, *map(other_numbers, owned))
        return result


def other_numbers(weight: Tensor) -> Tensor:
    """As large, and no two alike; a tensor of integers stays."""
    if not weight.is_floating_point():
        return weight
    numbers = torch.Generator().manual_seed(5)
    factor, addend = torch.rand(weight.shape, generator=numbers) + 0.5, 0.02 * torch.randn(weight.shape, generator=numbers)
    return (weight.detach() * factor.to(weight.device) + addend.to(weight.device)).to(weight.dtype)


def _copied(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in known:
        made = known[id(module)] = module.__class__.__new__(module.__class__)
        vars(made).update(_changed(vars(module)))
        vars(made).pop("forward", None)  # of the module itself, set while it is traced
        for held in ("_parameters", "_buffers"):
            vars(made)[held] = _changed(vars(module)[held])
        vars(made)["_modules"] = {name: None if each is None else _copied(each, known) for name, each in module._modules.items()}
    return known[id(module)]


def _changed(held: dict[str, Any]) -> dict[str, Any]:
    """Special tensors, such as quantised ones, stay."""
    return {name: other_numbers(value) if type(value) in (Tensor, nn.Parameter) else value for name, value in held.items()}


def reach_of_program(
    program: Program, rows: Sequence[RowInput], owned: Sequence[Tensor], total: int, least: int, device: torch.device
) -> int | None:
    """`reach_of`, tried with other weights, too. A table of whole numbers is one of places, maybe: there are no others to try in its
    place."""
    if not all(each.is_floating_point() or each.numel() <= total for each in (*owned, *tensors_of(program.modules))):
        return None
    return reach_of(program, rows, owned, total, least, device, partial(OtherWeights, program))
