"""Which layers of a model may be alike: the same classes, weights of the same form, and the same plain attributes."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (int, float, str, type(None))
PLAIN_TENSORS = (Tensor, nn.Parameter)
FEWEST = 6  # fewest equal layers that are worth it: two are traced anyway


@dataclass(frozen=True)
class AlikeLayers:
    """Layers of one list that seem to compute the same with other weights.

    Attributes:
        names: as `model.named_modules()` has them, in the order of the list; the first two are traced.
        results: how many results a layer returns in a tuple; 0 for a tensor.
    """

    names: tuple[str, ...]
    results: int


def alike_layers(model: nn.Module, call: Callable[[], object]) -> list[AlikeLayers]:
    """Groups of layers in the model's outermost lists that it calls once, with the same kinds of results.

    Args:
        call: calls the model, on anything.
    """
    groups: list[tuple[str, ...]] = []
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for name, layers in lists:
        if not all(type(tensor) in PLAIN_TENSORS for tensor in (*layers.parameters(), *layers.buffers())):
            continue  # cut over ranks, or quantised: their class knows how
        if len(layers) < FEWEST or any(name.startswith(f"{other}.") for other, _ in lists):
            continue
        kinds: dict[Any, list[str]] = defaultdict(list)
        own = _own_numbers(layers)
        for index, layer in layers.named_children():
            kinds[_kind(layer, own)].append(f"{name}.{index}")
        groups += [tuple(names) for names in kinds.values() if len(names) >= FEWEST]
    if not groups:
        return []
    results = _results(model, [name for names in groups for name in names], call)
    kept = []
    for names in groups:
        forms = {form for each in names for form in results[each]}
        if len(forms) == 1 and (form := forms.pop()) is not None and all(len(results[each]) == 1 for each in names):
            kept.append(AlikeLayers(names, form))
    return kept


def _own_numbers(layers: nn.ModuleList) -> set[tuple[str, str]]:
    """Attributes, by path and name, that are the layer's place in its list in all layers that have them."""
    found, others = set[tuple[str, str]](), set[tuple[str, str]]()
    for index, layer in enumerate(layers):
        for path, part in layer.named_modules():
            for name, value in vars(part).items():
                if type(value) is int:
                    (found if value == index else others).add((path, name))
    return found - others


def _kind(layer: nn.Module, own: set[tuple[str, str]]) -> Any:
    """Equal for layers that seem alike. Their own numbers are left out: `same_code.py` sees whether they are read."""
    found: list[Any] = []
    for path, part in layer.named_modules():
        plain = sorted((name, value) for name, value in vars(part).items() if isinstance(value, PLAIN))
        found.append((path, type(part), tuple((name, repr(value)) for name, value in plain if (path, name) not in own)))
        if (forward := vars(part).get("forward")) is not None:
            function, constants = closure(forward) if path else (id(forward), ())
            found.append((function, tuple(repr(value) for value in constants if type(value) is not int)))
    found += [(name, form_of(tensor)) for name, tensor in layer.state_dict(keep_vars=True).items()]
    return tuple(found)


def numbers_of_ops(layer: nn.Module) -> tuple[int, ...]:
    """Under which the ops know modules of a layer whose forwards call ops instead: each such forward keeps its own."""
    forwards = (vars(part).get("forward") for part in layer.modules() if part is not layer)
    return tuple(value for each in forwards if each is not None for value in closure(each)[1] if type(value) is int)


def closure(forward: Any) -> tuple[Any, tuple[Any, ...]]:
    """The code of a forward that was put in the place of a module's own, and its constants; what is not a function is like nothing else."""
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, types.FunctionType):
        return id(forward), ()
    contents = (cell.cell_contents for cell in function.__closure__ or ())
    return function.__code__, tuple(value for value in contents if isinstance(value, PLAIN))


def form_of(tensor: Tensor) -> Any:
    """All of a tensor but its numbers."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _results(model: nn.Module, names: list[str], call: Callable[[], object]) -> dict[str, list[int | None]]:
    """What each call of these layers returned: 0 a tensor like the first that it was given, n a tuple of that and n - 1 times None."""
    seen: dict[str, list[int | None]] = {name: [] for name in names}

    def after(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        one, *others = output if isinstance(output, tuple) and output else (output,)
        alike = isinstance(one, Tensor) and isinstance(first, Tensor) and form_of(one) == form_of(first)
        ours = alike and all(each is None for each in others)
        seen[name].append((1 + len(others)) * isinstance(output, tuple) if ours else None)

    with ExitStack() as undo, torch.no_grad():
        for name in names:
            undo.callback(model.get_submodule(name).register_forward_hook(partial(after, name), with_kwargs=True).remove)
        call()
    return seen
