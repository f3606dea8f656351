"""Modules that mix tokens in a way that is neither attention nor a recurrence (a compressor whose entries grow with the tokens). Each
becomes one op while the rest of the model is captured, and runs unchanged, without a cache, on all tokens of a request
(docs/design/recompute.md).

Its inputs for each token are kept in pages. As for any recomputed layer, it is proved that no later token changes an earlier row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paged_attn.attn_ops.ops.module import MODULE_ON_ALL_TOKENS, register_module
from paged_attn.calling.left_as_it_was import replaced_forward
from paged_attn.calling.plain_modes import as_served
from paged_attn.engine.tracing.module_calls import LENGTHS, watch_calls, with_running_flag
from paged_attn.recurrent.watching.watch import named_arguments, positional_names

Path = tuple[Any, ...]  # the parameter, then keys and indices


@dataclass(frozen=True)
class _Given:
    """Stands for a tensor."""

    dtype: torch.dtype


class Left:
    """Stands for an object that a module returns beside its rows."""


@dataclass(frozen=True)
class AllTokensCall:
    """How a module is called on so many tokens.

    Attributes:
        arguments: by parameter, without the tensors.
        paths: where the tensors are among them.
        like: which of these the result is shaped like.
        at, count: where in the returned tuple the result is, and how long that is; None where it is returned alone.
        objects: where in it there are objects that are not tensors; the trace has empty ones there, to which a caller may write.
        why: what keeps the module from being run from a state, for the log.
    """

    arguments: Mapping[str, Any]
    paths: tuple[Path, ...]
    like: int
    at: int | None
    count: int
    objects: tuple[int, ...] = ()
    why: str = ""

    @classmethod
    def of(cls, arguments: Mapping[str, Any], output: Any, length: int) -> AllTokensCall | None:
        """None if it returns nothing with a row per token that is shaped like what it is given."""
        found = dict(_tensors(arguments, ()))
        several = isinstance(output, (tuple, list))
        for at, result in enumerate(output if several else (output,)):
            if isinstance(result, Tensor) and result.dim() == 3 and result.shape[:2] == (1, length):
                alike = [i for i, given in enumerate(found.values()) if given.shape == result.shape and given.dtype == result.dtype]
                if alike:
                    known = tree_map_only(Tensor, lambda tensor: _Given(tensor.dtype), arguments)
                    if not several:
                        return cls(known, tuple(found), alike[0], None, 1)
                    objects = [i for i, other in enumerate(output) if other is not None and not isinstance(other, Tensor)]
                    return cls(known, tuple(found), alike[0], at, len(output), tuple(objects))
        return None

    def run(self, module: nn.Module, given: Sequence[Tensor]) -> Tensor:
        tensors = iter(given)
        output = module(**tree_map_only(_Given, lambda _: next(tensors), self.arguments))
        result: Tensor = output if self.at is None else output[self.at]
        return result


def modules_around(
    model: nn.Module, inner: Iterable[str], inputs: Callable[[int], dict[str, Any]], why: str = ""
) -> dict[str, AllTokensCall]:
    """The innermost modules, these or around these, that return a row per token, and how they are called; nothing unless each has one.

    Args:
        inputs: those of a call of the model on so many tokens, without a cache.
        why: what keeps them from being run from a state, for the log.
    """
    outwards = {name: [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)] for name in inner}
    modules = {path: model.get_submodule(path) for paths in outwards.values() for path in paths}
    seen: dict[nn.Module, list[AllTokensCall | None]] = {module: [] for module in modules.values()}

    def look(length: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen[module].append(AllTokensCall.of(named_arguments(module, args, kwargs), output, length))

    with as_served(model):
        watch_calls(model, seen, inputs, look)
    # As often as the model is called, and each time in the same way.
    same = {path: calls[0] for path, module in modules.items() if len(calls := seen[module]) == len(LENGTHS) and calls[0] == calls[-1]}
    found: dict[str, AllTokensCall] = {}
    for paths in outwards.values():
        call = next(((path, call) for path in paths if (call := same.get(path)) is not None), None)
        if call is None:
            return {}
        found[call[0]] = replace(call[1], why=why)
    return found


@contextmanager
def on_all_tokens(model: nn.Module, calls: Mapping[str, AllTokensCall]) -> Iterator[None]:
    """Inside, while torch.compile traces, each of these modules is one op; afterwards the model is as it was."""
    with ExitStack() as undo:
        for name, call in calls.items():
            module = model.get_submodule(name)
            undo.enter_context(replaced_forward(module, _emitter(module, call)))
        yield


def _emitter(module: nn.Module, call: AllTokensCall) -> Callable[..., Any]:
    run, running = with_running_flag(call.run)
    original, number = module.forward, register_module(module, run)
    names, paths, like, at, count, objects = positional_names(module), call.paths, call.like, call.at, call.count, call.objects

    def forward(*args: Any, **kwargs: Any) -> Any:
        if running[0] or not torch.compiler.is_compiling():
            return original(*args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        given = []
        for path in paths:
            value: Any = arguments
            for key in path:
                value = value[key]
            given.append(value)
        result = MODULE_ON_ALL_TOKENS(given, like, number)[:, 0]
        if at is None:
            return result
        return tuple([result if index == at else Left() if index in objects else None for index in range(count)])

    return forward


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (dict, tuple, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(part, (*path, key))
