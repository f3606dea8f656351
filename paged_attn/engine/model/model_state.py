"""A model at one moment: its modules, tensors, hooks and attributes, and what has changed since.

It is compared whenever requests arrive, so a comparison only goes through a handful of flat lists: about 0.3 ms for 32 layers.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from paged_attn.calling.hf_configs import attention_configs

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
# Training among them, which no engine follows, and what is kept with a model or calls it, and is not part of it.
_NOT_LOOKED_AT = frozenset(vars(nn.Module())) | {"_output_capturing_hooks_installed", "_compiled_call_impl", "_paged_attn_engine"}
_RECORDING = "transformers.utils.output_capturing"  # hooks of this module do nothing unless a caller asks for what they record
_FOR_TRAINING = ("make_inputs_require_grads", "make_inputs_require_grad")  # training hooks of transformers and peft; they change no output
_GONE = object()


@dataclass
class Difference:
    """What differs, in words that name it.

    Attributes:
        replaced: submodules, parameters and hooks that are others than they were, or parameters of another dtype, shape or device.
        altered: attributes, buffers, classes and hooks on all modules.
        moved: parameters and buffers that lie at another address.
        written: something was written into a parameter or buffer.
    """

    replaced: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    written: bool = False


class ModelState:
    """The model as it is when this is made. Changes of the numbers in inference tensors, which have no versions, are not seen."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._written_by_itself: list[Tensor] = []
        self.take()
        _watch_optimizers(self)

    def take(self) -> None:
        """From now on what the model is now is what it was."""
        model = self._model
        modules = dict(model.named_modules())
        self._paths, self._modules = list(modules), list(modules.values())
        self._types: list[Any] = list(map(type, self._modules))
        self._forwards = {kind: kind.forward for kind in self._types}
        self._children = _Entries((path, vars(module)["_modules"]) for path, module in modules.items())
        self._parameters = _Entries((path, vars(module)["_parameters"]) for path, module in modules.items())
        self._buffers = _Entries((path, vars(module)["_buffers"]) for path, module in modules.items())
        self._hooks = _Entries((path, vars(module)[name]) for path, module in modules.items() for name in _HOOKS)
        owners: list[tuple[str, dict[str, Any]]] = [(path, vars(module)) for path, module in modules.items()]  # type: ignore[misc]
        owners += [(type(config).__name__, vars(config)) for config in attention_configs(model)]
        self._global_hooks = _Entries(("", getattr(nn.modules.module, name)) for name in _GLOBAL_HOOKS)
        self._attributes = _Attributes(owners)
        tensors = [*self._parameters.values(), *self._buffers.values()]
        self._names = [*self._parameters.names(), *self._buffers.names()]
        self._tensors = {name: tensor for name, tensor in zip(self._names, tensors, strict=True) if tensor is not None}
        self._listed = list(self._tensors.values())
        self._kinds = list(map(_kind, self._listed))
        self._pointers = list(map(Tensor.data_ptr, self._listed))
        own = set(map(id, self._written_by_itself))
        self._with_versions = [tensor for tensor in self._listed if not tensor.is_inference() and id(tensor) not in own]
        self._versions = _versions(self._with_versions)
        self._was_trained, self._ids = False, frozenset(map(id, self._listed))
        self._take_sentinels()

    def note_training(self, trained: set[int]) -> None:
        """An optimizer has made a step with parameters of these ids. The fused ones do not count what they write."""
        self._was_trained |= not trained.isdisjoint(self._ids)

    def _take_sentinels(self) -> None:
        step = max(len(self._with_versions) // 8, 1)
        chosen = list(zip(self._with_versions, self._versions, strict=True))[::step][:8]
        self._sentinels, self._sentinel_versions = [tensor for tensor, _ in chosen], [version for _, version in chosen]

    def versions(self) -> list[int]:
        """How often each tensor was written so far."""
        return _versions(self._with_versions)

    def leave_out_written_since(self, before: list[int]) -> None:
        """Buffers that were written since `versions` said this are the model's own to write: their numbers are not looked at any more.
        Parameters are somebody else's, such as a thread's that loads weights meanwhile."""
        now = self.versions()
        if now == before:
            return
        own = {i for i, tensor in enumerate(self._with_versions) if before[i] != now[i] and not isinstance(tensor, nn.Parameter)}
        kept = [i for i in range(len(now)) if i not in own]
        self._written_by_itself += [self._with_versions[i] for i in own]
        self._with_versions, self._versions = [self._with_versions[i] for i in kept], [self._versions[i] for i in kept]
        self._take_sentinels()

    def may_be_written(self) -> bool:
        """Whether something was written into one of eight tensors, as into all of them when weights are loaded or trained; 1 us."""
        return self._was_trained or _versions(self._sentinels) != self._sentinel_versions

    def difference(self) -> Difference | None:
        """What differs from now; None if nothing does."""
        same = (
            self._children.same() and self._parameters.same() and self._buffers.same() and self._hooks.same() and self._attributes.same()
            and self._global_hooks.same()
            and all(map(is_, map(type, self._modules), self._types)) and all(kind.forward is f for kind, f in self._forwards.items())
            and not self._was_trained and _versions(self._with_versions) == self._versions
            and list(map(Tensor.data_ptr, self._listed)) == self._pointers
        )  # fmt: skip
        if same:
            return None
        found = Difference()
        found.replaced += [f"the module {name} was replaced" for name in self._children.changed()]
        found.replaced += [f"the parameter {name} was replaced" for name in self._parameters.changed()]
        found.replaced += [f"a hook of {name.rpartition('.')[0] or 'the model'} came or went" for name in self._hooks.changed(_is_inert)]
        found.altered += [f"the buffer {name} was replaced" for name in self._buffers.changed()] + self._attributes.changed()
        found.altered += ["a hook on all modules came or went" for _ in self._global_hooks.changed(_is_inert)[:1]]
        for path, module, kind in zip(self._paths, self._modules, self._types, strict=True):
            if type(module) is not kind:
                found.altered.append(f"{path or 'the model'} was a {kind.__name__} and is a {type(module).__name__}")
        found.altered += [f"{kind.__name__}.forward was replaced" for kind, f in self._forwards.items() if kind.forward is not f]
        for (name, tensor), was, pointer in zip(self._tensors.items(), self._kinds, self._pointers, strict=True):
            if _kind(tensor) != was:
                found.replaced.append(f"{name} was {_described(was)} and is {_described(_kind(tensor))}")
            elif tensor.data_ptr() != pointer:
                found.moved.append(name)
        found.written = self._was_trained or _versions(self._with_versions) != self._versions
        if found.replaced or found.altered or found.moved or found.written:
            return found
        self.take()  # an equal value in another object, a hook that does nothing
        return None


_lock = threading.Lock()
_states: weakref.WeakSet[ModelState] = weakref.WeakSet()
_hook: Any = None  # called after every optimizer's step, once there is a first state


def _watch_optimizers(state: ModelState) -> None:
    global _hook
    with _lock:
        _states.add(state)
        if _hook is None:
            _hook = register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with _lock:
        states = list(_states)
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} if states else set[int]()
    for state in states:
        state.note_training(trained)


class _Entries:
    """The entries of many tables, by identity."""

    def __init__(self, tables: Iterable[tuple[str, dict[Any, Any]]]) -> None:
        self._all = list(tables)
        self._tables = [table for _, table in self._all]
        self._filled, self._empty = [table for table in self._tables if table], [table for table in self._tables if not table]
        self._values = list(self.values())
        self._before = [dict(table) for table in self._tables]

    def values(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._filled))

    def names(self) -> list[str]:
        return [f"{path}.{key}".lstrip(".") for path, table in self._all for key in table]

    def same(self) -> bool:
        as_many = not any(self._empty) and sum(map(len, self._filled)) == len(self._values)
        return as_many and all(map(is_, self.values(), self._values))

    def changed(self, is_nothing: Any = None) -> list[str]:
        """Names of those that came, went or are others, except entries that are nothing."""
        found = []
        for (path, table), before in zip(self._all, self._before, strict=True):
            for key in [*before, *(key for key in table if key not in before)]:
                was, now = before.get(key), table.get(key)
                if was is not now and not (is_nothing and all(value is None or is_nothing(value) for value in (was, now))):
                    found.append(f"{path}.{key}".lstrip("."))
        return found


class _Attributes:
    """The attributes of modules and configs: plain values by what they are, everything else by identity."""

    def __init__(self, owners: list[tuple[str, dict[str, Any]]]) -> None:
        self._owners = owners
        self._dicts = [attributes for _, attributes in owners]
        self._count = sum(map(len, self._dicts))
        slots = [(path, attributes, key) for path, attributes in owners for key in attributes if key not in _NOT_LOOKED_AT]
        self._slots = [(attributes, key) for _, attributes, key in slots]
        self._owners_of_slots, self._keys = [attributes for attributes, _ in self._slots], [key for _, key in self._slots]
        self._names = [f"{path}.{key}".lstrip(".") for path, _, key in slots]
        self._values = [attributes[key] for attributes, key in self._slots]
        self._containers = [value for value in self._values if type(value) in (list, dict, set) and _is_plain(value)]
        self._contents = copy.deepcopy(self._containers)
        self._known = {id(value): contents for value, contents in zip(self._containers, self._contents, strict=True)}

    def same(self) -> bool:
        if sum(map(len, self._dicts)) != self._count:
            return False
        now = map(dict.get, self._owners_of_slots, self._keys, repeat(_GONE))
        return all(map(is_, now, self._values)) and _equal(self._containers, self._contents)

    def changed(self) -> list[str]:
        found = []
        for name, (attributes, key), was in zip(self._names, self._slots, self._values, strict=True):
            now = attributes.get(key, _GONE)
            before = self._known.get(id(was), was)
            if now is _GONE:
                found.append(f"{name} is gone")
            elif now is not was and not (_is_plain(was) and _equal(now, before)):
                found.append(f"{name} was {_short(before)} and is {_short(now)}")
            elif now is was and id(was) in self._known and not _equal(now, before):
                found.append(f"{name} was {_short(before)} and is {_short(now)}")
        known = {(id(attributes), key) for attributes, key in self._slots}
        for path, attributes in self._owners:
            new = [key for key in attributes if key not in _NOT_LOOKED_AT and (id(attributes), key) not in known]
            found += [f"{f'{path}.{key}'.lstrip('.')} is new" for key in new]
        return found


def _is_plain(value: Any) -> bool:
    """Numbers, texts, truth values, None and containers of those: they can be compared and copied."""
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str)


def _equal(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except (RuntimeError, ValueError):  # a tensor has come in
        return False


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def hooked_module(model: nn.Module) -> str:
    """The path of a module with a forward hook that may do something when the model is called; "" if there is none."""
    for path, module in model.named_modules():
        if not all(_is_inert(hook) for name in _HOOKS for hook in vars(module)[name].values()):
            return path or type(model).__name__
    every = [hook for name in _GLOBAL_HOOKS for hook in getattr(nn.modules.module, name).values()]
    return "" if all(map(_is_inert, every)) else "all modules"


def _is_inert(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == _RECORDING or getattr(hook, "__name__", "") in _FOR_TRAINING


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.device


def _described(kind: tuple[Any, ...]) -> str:
    dtype, shape, device = kind
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def _short(value: Any) -> str:
    words = repr(value) if _is_plain(value) else f"a {type(value).__name__}"
    return words if len(words) <= 80 else words[:77] + "..."
