"""A model as text: everything that its trace may depend on, except the values of its parameters and the code in its files.

Its tensors are named by paths that lead to them in any process.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.hashing.stable_hasher import MOST_BYTES, Indescribable, StableHasher, class_items, tensor_digest

# torch's own attributes of a module; which hooks count is decided separately.
_OF_TORCH = frozenset(nn.Module().__dict__)
_KEPT_WITH_IT = ("_paged_attn_engine",)  # stored on the model, but not part of it
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
_OURS = ("paged_attn.parallel.local_forwards", "paged_attn.parallel.own_experts")
_REPLACED = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "_compiled_call_impl")
Path = list[str]  # path of the module, then the attribute


def model_text(model: nn.Module) -> str:
    """Modules with their classes and attributes, configs, and each tensor's facts; of small buffers the values. Raises Indescribable:
    hooks, a forward that is replaced on an instance, or an attribute of which no text says all. The message names it."""
    if any(getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS):
        raise Indescribable("hooks on all modules")
    modules = {id(module): path for path, module in model.named_modules()}
    hasher = StableHasher(modules, strict=True)
    lines = [_module(path, module, hasher) for path, module in model.named_modules(remove_duplicate=False)]
    return "\n".join([*lines, *_classes(model), *_tensors(model)])


def _module(path: str, module: nn.Module, hasher: StableHasher) -> str:
    hooked = [name for name in _HOOKS if getattr(module, name, None)]
    hooked += [name for name in _REPLACED if module.__dict__.get(name) is not None and not _is_ours(name, module)]
    if hooked:
        raise Indescribable(f"{path or 'the model'} has {hooked[0]} of its own")
    kind = type(module)
    lines = [f"{path} {kind.__module__}.{kind.__qualname__} {list(module._modules)} {sorted(module._non_persistent_buffers_set)}"]
    for name, value in module.__dict__.items():
        if name in _OF_TORCH or name in _KEPT_WITH_IT:
            continue
        try:
            lines.append(f" {name}={hasher.text(value)}")
        except Indescribable as reason:
            raise Indescribable(f"{path or 'the model'}.{name} is or holds {reason}") from None
    return "\n".join(lines)


def _is_ours(name: str, module: nn.Module) -> bool:
    """A forward that `parallel` put in the place of transformers' for a rank's own tensors: what it holds is told like other values."""
    return name == "forward" and getattr(module.forward, "__module__", None) in _OURS


def _classes(model: nn.Module) -> Iterator[str]:
    """What the classes define, also those of torch, and not what the modules in which they lie hold besides."""
    kinds = {base: None for module in model.modules() for base in type(module).__mro__ if base not in (object, nn.Module)}
    hasher = StableHasher({}, strict=False)
    for kind in kinds:
        items = ", ".join(f"{name}={hasher.text(value)}" for name, value in class_items(kind))
        yield f"class {kind.__module__}.{kind.__qualname__} {inspect.isabstract(kind)} {items}"


def _tensors(model: nn.Module) -> Iterator[str]:
    storages: dict[int, int] = {}
    known: dict[int, str] = {}
    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for path, tensor in named:
            first = known.setdefault(id(tensor), path)
            yield f"{kind} {path} is {first}" if first != path else f"{kind} {path} {tensor_facts(tensor, storages)}"
            if kind == "buffer" and first == path and tensor.nbytes <= MOST_BYTES and tensor.layout == torch.strided:
                yield f"values {tensor_digest(tensor)}"


def tensor_facts(tensor: Tensor, storages: dict[int, int]) -> str:
    """All of a tensor but its values; `storages` numbers the memory that tensors share."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        raise Indescribable(f"a tensor of class {type(tensor).__qualname__} and layout {tensor.layout}")
    memory = tensor.untyped_storage()
    number = storages.setdefault(memory.data_ptr(), len(storages))
    shared = tensor.device.type == "cpu" and tensor.is_shared()
    flags = (tensor.requires_grad, tensor.is_leaf, tensor.is_inference(), tensor.is_conj(), tensor.is_neg(), shared)
    extra = sorted(name for name in getattr(tensor, "__dict__", {}) if not name.startswith("_dynamo_"))  # Dynamo marks what it has seen
    return (
        f"{type(tensor).__name__} {tensor.dtype} {tensor.device} {tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()} "
        f"memory {number} of {memory.nbytes()} bytes {flags} {extra}"
    )


class OwnedTensors:
    """Parameters, buffers and tensors that are plain attributes of modules; of tensors that are views of the same memory the first."""

    def __init__(self, model: nn.Module) -> None:
        self._paths: dict[Any, Path] = {}
        for path, tensor in _found(model):
            self._paths.setdefault(_identity(tensor), path)

    def path_of(self, tensor: Tensor) -> Path:
        """Raises Indescribable for a tensor that is none of the model's modules' own."""
        try:
            return self._paths[_identity(tensor)]
        except KeyError:
            raise Indescribable(f"a tensor of shape {list(tensor.shape)} that is not an attribute of a module") from None

    @staticmethod
    def at(model: nn.Module, path: Path) -> Tensor:
        """The tensor as a trace is given it; AttributeError or TypeError if there is none."""
        module, name = path
        tensor = getattr(model.get_submodule(module), name)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{module}.{name} is a {type(tensor).__name__}")
        return tensor.detach() if getattr(tensor, "_is_buffer", False) else tensor  # as `plain_buffers` hands it to the trace


def _found(model: nn.Module) -> Iterator[tuple[Path, Tensor]]:
    for path, module in model.named_modules():
        for named in (module._parameters, module._buffers, module.__dict__):
            for name, value in named.items():
                if isinstance(value, Tensor):
                    yield [path, name], value


def _identity(tensor: Tensor) -> Any:
    # Not the object: buffers are traced as other tensors of the same memory.
    return (isinstance(tensor, nn.Parameter), tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
