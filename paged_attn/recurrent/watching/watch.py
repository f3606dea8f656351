"""Runs a model once and records what each module takes, returns and changes in the cache."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.calling.left_as_it_was import left_as_it_was
from paged_attn.recurrent.cache_state import Path, Snapshot, changed_paths, leaves_of, snapshot


@dataclass
class Call:
    """One call of one module that was given the cache.

    Attributes:
        arguments: by parameter name, including keywords of `**kwargs`.
        cache_name: the parameter that received the cache.
        changed: paths of the cache that differ after the call.
        own: those of them with another value than its submodules left there.
    """

    name: str
    module: nn.Module
    arguments: dict[str, Any]
    cache_name: str
    output: Any = None
    changed: set[Path] = field(default_factory=set)
    own: set[Path] = field(default_factory=set)


@dataclass
class Watched:
    """One call of the model.

    Attributes:
        calls: of modules that were given the cache, in the order in which they ended.
        fresh, cache: the cache before the first and after the last of them; None if no module was given one.
        output: the model's result.
        attributes: by path, tensors in plain attributes of modules that the call replaced; they are restored.
    """

    calls: list[Call]
    fresh: Any
    cache: Any
    output: Any
    attributes: dict[str, Tensor]

    @cached_property
    def leaves(self) -> dict[Path, Any]:
        """What `cache` holds, by path."""
        return leaves_of(self.cache)


def watch(model: nn.Module, inputs: dict[str, Any]) -> Watched:
    """Runs `model(**inputs)`, which makes its own cache, and restores the model."""
    watcher = _Watcher()
    with left_as_it_was(model) as changes, torch.no_grad():
        for name, module in model.named_modules():
            watcher.hook(name, module)
        output = model(**inputs)
    return Watched(watcher.calls, watcher.fresh, watcher.cache, output, changes.attributes)


class _Watcher:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.fresh: Any = None
        self.cache: Any = None
        self._open: list[tuple[Call, Snapshot, Snapshot]] = []  # call, the cache before, what its submodules have left there

    def hook(self, name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = named_arguments(module, args, kwargs)
            cache_name = next((key for key, value in arguments.items() if is_cache(value)), None)
            if cache_name is None:
                return
            if self.cache is None:
                self.cache = arguments[cache_name]
                self.fresh = copy.deepcopy(self.cache)
            if arguments[cache_name] is self.cache:
                self._open.append((Call(name, module, arguments, cache_name), snapshot(self.cache), {}))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not self._open or self._open[-1][0].module is not module:
                return
            call, earlier, inner = self._open.pop()
            now = snapshot(self.cache)
            call.output, call.changed = output, changed_paths(earlier, now)
            call.own = call.changed & changed_paths({**earlier, **inner}, now)
            self.calls.append(call)
            if self._open:
                self._open[-1][2].update({path: now[path] for path in call.changed})

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)


def is_cache(value: Any) -> bool:
    """Whether it is a transformers cache."""
    from transformers.cache_utils import Cache

    return isinstance(value, Cache)


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without extra positional ones for `*args`."""
    names = positional_names(module)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a module's forward that can be passed by position, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds)
