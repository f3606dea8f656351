"""Turns modules that torch.compile cannot trace into one op each while the rest of the model is captured.

A mixture of experts that loops over the experts that have a token has no single graph. If the trace fails inside a submodule's forward on
a number that depends on the data, all modules of that class become `module_with_output` and the trace is tried again.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import first_line
from paged_attn.attn_ops.model_code import MODEL_ERRORS
from paged_attn.attn_ops.ops.module import MODULE, register_module
from paged_attn.calling.left_as_it_was import replaced_forward
from paged_attn.engine.tracing.experts_as_ops import agrees, kind_of
from paged_attn.engine.tracing.looping.calls import CallForm
from paged_attn.engine.tracing.module_calls import LENGTHS, watch_calls, with_running_flag
from paged_attn.engine.tracing.trace_failure import NotTraced
from paged_attn.passes.recompute.code_numbers import crowd_of

logger = logging.getLogger("paged_attn")
FEW = 20  # one in so many rows


class NeedsWholeRequest(NotTraced):
    """A module branches on its data, and what it computes for a token depends on other tokens of the call.

    Attributes:
        kind: its class.
    """

    def __init__(self, module: nn.Module, words: str) -> None:
        self.kind = type(module)
        super().__init__(f"{self.kind.__name__} {words}")


class LimitsTokens(NeedsWholeRequest):
    """It computes other numbers for some of many tokens that are all alike."""

    def __init__(self, module: nn.Module, rows: int) -> None:
        super().__init__(
            module,
            f"computes something else for some of {rows} equal tokens, as experts with a capacity do: other tokens change a token's.",
        )


class ReadsMask(NeedsWholeRequest):
    """It is given a mask."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(
            module,
            "branches on a mask of every pair of tokens of a call, which a batch of several requests does "
            "not have: where a mask only goes into attention, it is found and proved.",
        )


def line_of(failure: BaseException | None) -> str:
    """Where in the model's code it is, as words that follow others."""
    frames = getattr(failure, "real_stack", None)
    return f" at {frames[-1].filename}:{frames[-1].lineno} (`{frames[-1].line}`)" if frames else ""


def untraceable_class(model: nn.Module, failure: BaseException | None) -> type[nn.Module] | None:
    """The class of the innermost submodule in whose forward Dynamo met a number that depends on data; None for other failures."""
    if "data-dependent" not in str(failure):
        return None
    return class_running(model, [(frame.filename, frame.lineno, frame.name) for frame in getattr(failure, "real_stack", None) or ()])


def class_running(model: nn.Module, frames: Sequence[tuple[str, int, str]]) -> type[nn.Module] | None:
    """The class of the innermost submodule with a method among these calls: file, line and function of each, the innermost last.

    A list comprehension counts as the method that it stands in. Of a file the end of its path is enough: torch leaves off the beginning of
    some.
    """
    classes = {type(module) for name, module in model.named_modules() if name}
    methods = {code: kind for kind in classes for base in reversed(kind.__mro__) for code in _codes_of(base)}
    codes: dict[types.CodeType, type[nn.Module]] = methods | {inspect.unwrap(kind.forward).__code__: kind for kind in classes}
    for file, number, function in reversed(frames):
        for code, kind in codes.items():
            last = max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)
            same = code.co_name == function or function.startswith("<")
            if same and code.co_filename.endswith(file) and code.co_firstlineno <= number <= last:
                return kind
    return None


def _codes_of(base: type) -> list[types.CodeType]:
    """The code of a class's own methods; none of torch's classes."""
    if base is object or base.__module__.startswith("torch."):
        return []
    return [each.__code__ for each in vars(base).values() if isinstance(each, types.FunctionType)]


@contextmanager
def modules_as_ops(model: nn.Module, classes: Mapping[type[nn.Module], str], inputs: Callable[[int], dict[str, Any]]) -> Iterator[None]:
    """Inside, while torch.compile traces, every module of these classes is one op; afterwards the model is as it was.

    Args:
        classes: and where the trace of each fails, in words.
        inputs: those of a call of so many tokens.

    Raises:
        ReadsMask: such a module is given a mask.
        LimitsTokens: its experts take only so many tokens.
        NotTraced: it is given or returns something else than tensors, or its output has no shape of an input's.
    """
    with ExitStack() as undo:
        if classes:
            for module, call in _calls_of(model, classes, inputs).items():
                undo.enter_context(replaced_forward(module, _emitter(module, call)))
        yield


@dataclass(frozen=True)
class _Call(CallForm):
    """And which of the tensors its output is shaped like."""

    like: int
    dtype: torch.dtype


def _calls_of(model: nn.Module, classes: Mapping[type[nn.Module], str], inputs: Callable[[int], dict[str, Any]]) -> dict[nn.Module, _Call]:
    """How each of the modules is called, from runs of the model on two lengths."""
    seen: dict[nn.Module, set[_Call]] = {}
    tensors: dict[nn.Module, list[list[Tensor]]] = {}

    def look(length: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nothing = tuple((name, None) for name, value in kwargs.items() if value is None)
        keywords = {name: value for name, value in kwargs.items() if value is not None}
        names: tuple[str | None, ...] = (*[None] * len(args), *keywords)
        given = [*args, *keywords.values()]
        alike = [
            i for i, value in enumerate(given) if isinstance(value, Tensor) and isinstance(output, Tensor) and value.shape == output.shape
        ]
        if any(isinstance(value, Tensor) and value.shape[-2:] == (length, length) for value in given):
            raise ReadsMask(module)
        if not all(isinstance(value, Tensor) for value in given) or not alike:
            line = next(line for kind, line in classes.items() if isinstance(module, kind))
            raise NotTraced(
                f"{type(module).__name__} cannot be traced, as it branches on a number in a tensor{line}, and it cannot "
                f"be called as one op: it is given {', '.join(type(v).__name__ for v in given)} and returns {type(output).__name__}; known "
                "are tensors, and an output that is shaped like one of them. A branch that always goes one way (on a buffer) can be "
                "decided in __init__."
            )
        seen.setdefault(module, set()).add(_Call(names, nothing, alike[0], output.dtype))
        tensors.setdefault(module, []).append(given)

    watch_calls(model, [module for module in model.modules() if isinstance(module, tuple(classes))], inputs, look)
    several = [type(module).__name__ for module, calls in seen.items() if len(calls) > 1]
    if several:
        raise NotTraced(f"{several[0]} cannot be traced, and is called in several ways, so that it cannot be called as one op.")
    found = {module: next(iter(calls)) for module, calls in seen.items()}
    for module in {kind_of(module): module for module in found}.values():
        _refuse_limits(module, found[module], tensors[module])
    return found


def _refuse_limits(module: nn.Module, call: _Call, given: Sequence[Sequence[Tensor]]) -> None:
    """Raises LimitsTokens if the rows of many equal tokens differ. `given`: of calls of two lengths."""
    rows = crowd_of(module)
    axes = [
        next((axis for axis, sizes in enumerate(zip(a.shape, b.shape, strict=False)) if sizes == LENGTHS), None)
        for a, b in zip(*given[:2], strict=True)
    ]
    alike = [
        one if axis is None else one.narrow(axis, 0, 1).repeat_interleave(rows, axis) for one, axis in zip(given[0], axes, strict=True)
    ]
    if (axis := axes[call.like]) is None:
        return
    try:
        with torch.no_grad():
            result = call.call(module, alike).movedim(axis, 0)
    except torch.OutOfMemoryError:
        raise
    except MODEL_ERRORS as error:
        logger.info("%s is not tried on %d equal tokens: %s", type(module).__name__, rows, first_line(error))
        return
    other = sum(not agrees(result[0], row) for row in result)
    if other > (rows // FEW if result.dtype.itemsize == 2 else 0):  # rounding may turn equal scores of equal rows in 16 bits
        raise LimitsTokens(module, rows)


def _emitter(module: nn.Module, call: _Call) -> Callable[..., Tensor]:
    run, running = with_running_flag(call.call)
    original, number = module.forward, register_module(module, run)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        if running[0] or not torch.compiler.is_compiling():
            result: Tensor = original(*args, **kwargs)
            return result
        given = call.tensors_of(args, kwargs)
        assert given is not None
        output = torch.empty_like(given[call.like], dtype=call.dtype)
        MODULE(given, output, number)
        return output

    return forward
