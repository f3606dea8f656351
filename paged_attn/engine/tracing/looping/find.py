"""Blocks that hold a list of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from paged_attn.engine.tracing.experts_as_ops import kind_of
from paged_attn.engine.tracing.experts_layout import is_hooked
from paged_attn.engine.tracing.looping.stacked_pair import pair_within

_LISTS = (nn.ModuleList, nn.ModuleDict)


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Paths, blocks and their experts: two or more modules that are built alike, of two or three linear layers and nothing else.

    A list that is called itself is the block; else it is the module that has the list. Or two modules with a stacked weight each.
    """
    for name, module in model.named_modules():
        if name and isinstance(module, _LISTS) and type(module) not in _LISTS:
            lists = [tuple(module.children())]
        elif name and not isinstance(module, _LISTS):
            lists = [tuple(child.children()) for child in module.children() if type(child) in _LISTS]
        else:
            continue
        lists = [experts for experts in lists if _may_be_experts(experts)]
        if len(lists) == 1:
            yield name, module, lists[0]
        elif not lists and (pair := pair_within(module)) is not None:
            yield name, module, pair


def _may_be_experts(modules: Sequence[nn.Module]) -> bool:
    if len(modules) < 2 or len(set(map(id, modules))) < len(modules):
        return False
    kinds = {kind_within(module) for module in modules}
    linears = [name for name, module in modules[0].named_modules() if type(module) is nn.Linear]
    return len(kinds) == 1 and len(linears) in (2, 3) and "" not in linears


def kind_within(module: nn.Module) -> tuple[Any, ...]:
    """What makes two modules compute the same apart from their weights, submodules and all, as far as can be said without running them."""
    return tuple((name, *kind_of(part), _functions(part)) for name, part in module.named_modules())


def _functions(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Attributes that are no data and can be called: who has others computes something else."""
    return tuple((name, id(value)) for name, value in vars(module).items() if callable(value) and not isinstance(value, type))


def hooked_within(module: nn.Module) -> str:
    """The path of a part that somebody has hooked, or whose forward somebody replaced; empty if there is none."""
    return next((name or "itself" for name, part in module.named_modules() if is_hooked(part)), "")
