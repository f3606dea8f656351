"""The tensors of a model, by paths that lead to them in any process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from paged_attn.hashing.stable_hasher import Indescribable

Path = list[str]  # path of the module, then the attribute


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
