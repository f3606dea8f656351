"""Live Python values as text that is equal in two processes if and only if the values are."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import pathlib
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from paged_attn.hashing.code_text import code_digest

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    type(Ellipsis), type(NotImplemented), range, pathlib.PosixPath,
)  # fmt: skip
_SETS = (set, frozenset)
_CONTENT: dict[type, Callable[[Any], Any]] = {  # the content of a subclass, read without running its own code
    dict: lambda value: {key: dict.__getitem__(value, key) for key in dict.__iter__(value)},
    list: lambda value: list(list.__iter__(value)), tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: set(set.__iter__(value)), frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    str: str.__str__, int: int.__int__, float: float.__float__,
}  # fmt: skip
_PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {  # the parts that fully describe a wrapper
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    staticmethod: lambda value: (value.__func__,), classmethod: lambda value: (value.__func__,),
    property: lambda value: (value.fget, value.fset), functools.cached_property: lambda value: (value.func,),
    functools._lru_cache_wrapper: lambda value: (value.__wrapped__,),
    re.Pattern: lambda value: (value.pattern, value.flags), inspect.Signature: lambda value: (str(value),),
}  # fmt: skip
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)
# What transformers notes by the way: a number that is another in each process, and answers that it found when it was asked.
_NOTES = ("_original_object_hash", "_can_set_attn_implementation_cached_value", "_can_set_experts_implementation_cached_value")
MOST_BYTES = 1 << 20  # the largest tensor whose values are hashed
_MOST_VALUES = 500_000


class Indescribable(Exception):
    """A value of which no text says all."""


class StableHasher:
    """Describes values one after the other; what was described before is named by its number.

    Args:
        modules: the model's modules by id, with their paths. Any other module is indescribable.
        strict: raise for what cannot be described. Otherwise its type stands for it: for the globals of a Python file, of which
            code reads few.
        inside: a Python module; of classes and functions from elsewhere only the name and own code count.
    """

    def __init__(self, modules: Mapping[int, str], strict: bool, inside: str | None = None) -> None:
        self.modules, self.strict, self.inside = modules, strict, inside
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # numbered values must stay alive: another value could get the same id

    def text(self, value: Any) -> str:
        """Raises Indescribable, when strict; also for more than half a million values."""
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, enum.Enum):
            return f"enum {type(value).__module__}.{type(value).__qualname__}.{value.name}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if type(value) in (tuple, frozenset):  # whether equal ones are the same object depends on how the code was loaded
            return self._container(value)
        number = self._numbers.get(id(value))
        if number is not None:
            return f"#{number}"
        if len(self._kept) >= _MOST_VALUES:
            raise Indescribable(f"more than {_MOST_VALUES:,} values")
        self._numbers[id(value)] = len(self._kept)
        self._kept.append(value)
        return self._compound(value)

    def _compound(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            path = self.modules.get(id(value))
            return f"submodule {path}" if path is not None else self._unknown(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, OpOverload | OpOverloadPacket):
            return f"op {value}"
        if isinstance(value, types.MethodType):
            return f"method({self.text(value.__self__)}, {self.text(value.__func__)})"
        if isinstance(value, _BUILTIN):
            return self._builtin(value)
        if type(value) in (list, dict, types.MappingProxyType, set):
            return self._container(value)
        if (parts := _parts(value)) is not None:
            return f"{type(value).__name__}({', '.join(map(self.text, parts))})"
        return self._instance(value)

    def _container(self, value: Any) -> str:
        if isinstance(value, Mapping):
            items = ", ".join(f"{self.text(key)}: {self.text(each)}" for key, each in value.items())
            return f"{{{items}}}"
        if isinstance(value, _SETS):
            if not all(type(each) in _PLAIN for each in value):
                return self._unknown(value)  # they would be numbered in another order next time
            return f"set({', '.join(sorted(map(self.text, value)))})"
        return f"{type(value).__name__}({', '.join(map(self.text, value))})"

    def _tensor(self, value: Tensor) -> str:
        facts = f"{type(value).__name__} {value.dtype} {value.device} {tuple(value.shape)} {value.layout} {value.requires_grad}"
        has_values = type(value) is Tensor and value.device.type != "meta" and value.layout == torch.strided
        if has_values and value.nbytes <= MOST_BYTES and _is_there(value):
            return f"{facts} {tensor_digest(value)}"
        return self._unknown(value) if self.strict else facts

    def _function(self, value: types.FunctionType) -> str:
        name = f"function {value.__module__}.{value.__qualname__} {code_digest(value.__code__)}"
        if self._is_of_another_file(value):
            return name
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(self.text(cell.cell_contents))
            except ValueError:  # not yet filled
                cells.append("empty")
        return f"{name} {self.text(value.__defaults__)} {self.text(value.__kwdefaults__)} [{', '.join(cells)}]"

    def _builtin(self, value: Any) -> str:
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            return f"bound {value.__name__} of {self.text(owner)}"
        return f"builtin {getattr(value, '__module__', None)}.{value.__qualname__}"

    def _class(self, value: type) -> str:
        name = f"class {value.__module__}.{value.__qualname__}"
        if _versioned_class(value) or self._is_of_another_file(value):
            return name
        outer, self.strict = self.strict, False  # a class from outside the model: only a few things are read
        try:
            bases = ", ".join(map(self.text, value.__bases__))
            return f"{name}({bases}) {self._named(class_items(value))}"
        finally:
            self.strict = outer

    def _instance(self, value: Any) -> str:
        kind = type(value)
        content = next((base for base in _CONTENT if isinstance(value, base)), None)
        if not self.strict and _is_live(kind):
            return self._unknown(value)
        attributes = dict(_attributes(value))
        if content is None and (_versioned_class(kind) or not attributes):  # a lock, a logger, an object() that marks something
            return self._unknown(value)
        held = "" if content is None else self.text(_CONTENT[content](value))
        return f"instance({self.text(kind)} {held} {self._named(attributes.items())})"

    def _is_of_another_file(self, value: Any) -> bool:
        return self.inside is not None and value.__module__ != self.inside

    def _named(self, items: Any) -> str:
        return "{" + ", ".join(f"{name}={self.text(each)}" for name, each in items if name not in _NOTES) + "}"

    def _unknown(self, value: Any) -> str:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if self.strict:
            raise Indescribable(f"a {kind}")
        return f"some {kind}"


def class_items(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class itself defines, by name; of names with two underscores, where Python keeps notes of its own, only code."""
    for name, value in kind.__dict__.items():
        if name in _NOTES:
            continue
        if not name.startswith("__") or isinstance(value, types.FunctionType | staticmethod | classmethod | property):
            yield name, value


def tensor_bytes(value: Tensor) -> bytes:
    """A dense tensor's values, row by row."""
    return value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()


def tensor_digest(value: Tensor) -> str:
    """A hash of a dense tensor's values."""
    return hashlib.sha256(tensor_bytes(value)).hexdigest()


def _parts(value: Any) -> tuple[Any, ...] | None:
    """What says all of a wrapper or a device mesh, or None if it is neither."""
    for kind, read in _PARTS.items():
        if isinstance(value, kind):
            return read(value)
    mesh: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)  # torch may be built without
    if mesh is not None and isinstance(value, mesh):
        groups = [group.group_name for group in value.get_all_groups()]
        return value.device_type, value.mesh.tolist(), value.mesh_dim_names, value.get_coordinate(), groups
    return None


def _versioned_class(kind: type) -> bool:
    """Whether it comes with torch or Python, whose versions say all."""
    root = kind.__module__.partition(".")[0]
    return root in ("torch", "builtins") or root in sys.stdlib_module_names


def _is_live(kind: type) -> bool:
    """Whether instances are engines, pools and the like of our own, which a script's globals hold and no model reads."""
    is_value = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0] and not is_value


def _is_there(value: Tensor) -> bool:
    """Whether its memory was not given back, as that of a closed engine's pool is: to read it would end the process."""
    last = value.storage_offset() + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return not value.numel() or (last + 1) * value.itemsize <= value.untyped_storage().nbytes()


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an instance, without running code of its class."""
    names = [name for base in type(value).__mro__ for name in _slots(base)] + ["default_factory"] * isinstance(value, defaultdict)
    for name in names:
        with suppress(AttributeError):  # a slot that is empty
            yield name, object.__getattribute__(value, name)
    with suppress(AttributeError):
        yield from object.__getattribute__(value, "__dict__").items()


def _slots(kind: type) -> list[str]:
    names = kind.__dict__.get("__slots__", ())
    return [name for name in ((names,) if isinstance(names, str) else names) if not name.startswith("__")]
