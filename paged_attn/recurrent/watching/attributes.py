"""Recurrent state that modules keep in plain attributes, found by two runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.model_code import model_may_fail
from paged_attn.calling.left_as_it_was import left_as_it_was
from paged_attn.recurrent.watching.watch import Call, named_arguments


def attribute_states(short: Mapping[str, Tensor], long: Mapping[str, Tensor]) -> list[str]:
    """The paths of attributes that calls on few and on many tokens both replaced by tensors of the same shape."""
    return sorted(path for path, value in long.items() if value.dim() > 1 and path in short and short[path].shape == value.shape)


def owners_of(paths: list[str]) -> dict[str, list[str]]:
    """The outermost modules with such attributes, and the attributes' paths below each."""
    modules = sorted({path.rpartition(".")[0] for path in paths})
    outer = [name for name in modules if not any(name.startswith(f"{other}.") for other in modules)]
    return {name: [path.removeprefix(f"{name}.") for path in paths if path.startswith(f"{name}.")] for name in outer}


def calls_of(model: nn.Module, inputs: dict[str, Any], names: Mapping[str, Any]) -> dict[str, list[Call]]:
    """Arguments and results of these modules in one call of the model, which is restored afterwards."""
    found: dict[str, list[Call]] = {name: [] for name in names}
    with left_as_it_was(model), torch.no_grad():
        for name in names:

            def after(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                found[name].append(Call(name, module, named_arguments(module, args, kwargs), "", output))

            model.get_submodule(name).register_forward_hook(after, with_kwargs=True)
        model(**inputs)
    return found


def without_unused(call: Call) -> frozenset[str]:
    """Sets those tensors in a call's arguments to None that the module does not need, such as masks.

    Returns:
        Their names, and those of parameters that were None (a mask of a prompt shorter than a window) and may be any tensor.
    """
    rows, unused = _output_tensor(call.output), set[str]()
    if rows is None or rows.dim() < 2:
        return frozenset()
    tokens = rows.shape[1]
    unread = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in (  # reading their values fails
        ((1, tokens), torch.bool), ((1, 1, tokens, tokens), torch.bool), ((1, 1, tokens, tokens + 1), rows.dtype)
    )]  # fmt: skip
    parameters = inspect.signature(call.module.forward).parameters
    for name, value in list(call.arguments.items()):
        if name not in parameters or not (value is None or isinstance(value, Tensor)):
            continue
        if isinstance(value, Tensor) and value.shape[:2] == rows.shape[:2]:
            continue
        if all(_gives(call, name, other, rows) for other in (unread if value is None else [None])):
            call.arguments[name] = None
            unused.add(name)
    return frozenset(unused)


def _gives(call: Call, name: str, other: Tensor | None, rows: Tensor) -> bool:
    """Whether the call still returns these rows with another value for the argument `name`."""
    with model_may_fail() as failures, left_as_it_was(call.module), torch.no_grad():
        again = _output_tensor(call.module(**{**call.arguments, name: other}))
    return not failures and again is not None and not again.is_meta and again.equal(rows)


def _output_tensor(output: Any) -> Tensor | None:
    parts = output if isinstance(output, (tuple, list)) else [output]
    return next((part for part in parts if isinstance(part, Tensor)), None)
