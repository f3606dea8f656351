"""Finds out why a trace failed, and words the message about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sympy import Symbol
from torch import SymInt, nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.hf.patch import can_be_hooked

_PLACE = re.compile(r"(?:# |^)([^#\n]+?):(\d+) in (\S+)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)\n\s*(\S.*)')

_STACK = "User stack:"
_CANNOT = "cannot be captured as one graph, which serving needs"


class NotTraced(UnsupportedError):
    """torch.compile makes no one graph of the model."""


class CountsTokens(NotTraced):
    """The number of tokens became a constant in the model's code, so that a trace would hold for calls of one length.

    Attributes:
        frames: file, line and function of each call on the way there, the innermost last.
    """

    frames: tuple[tuple[str, int, str], ...] = ()


def not_traced(model: nn.Module, failure: Exception) -> NotTraced:
    """The words for a failure of Dynamo's: what it says, and first where the number of tokens became a constant, if that is it."""
    name = type(model).__name__
    # Of the inputs that are named, others became constants where they met what was made of the first.
    frames = next((found for stack in str(failure).split(_STACK) if (found := _FRAME.findall(stack))), [])
    if isinstance(failure, ConstraintViolationError) and frames:
        file, line, _, code = frames[-1]
        why = (
            f": the number of tokens becomes a constant at {file}:{line} (`{code[:80]}`), so that the graph would hold for calls of one "
            "length. Python loops and lists over the tokens, and libraries that compile for each shape, do that; arange and comparisons "
            f"of tensors do not. torch.compile says:\n{failure}\n"
        )
        refusal = CountsTokens(f"{name} {_CANNOT}{why}")
        refusal.frames = tuple((file, int(line), function) for file, line, function, _ in frames)
        return refusal
    return NotTraced(f"{name} {_CANNOT}; torch.compile says:\n{failure}\n")


def counts_parts(model: nn.Module, args: Sequence[Any], first: int, last: int) -> CountsTokens:
    """The refusal of a model whose traces hold for calls of `first` to `last` tokens, and then for the next so many: a loop over blocks.

    Args:
        args: the inputs of the last such trace, among them the number of tokens.
    """
    sizes = [arg for arg in args if isinstance(arg, SymInt) and isinstance(arg.node.expr, Symbol)]
    guards = [guard for size in sizes[:1] for guard in size.node.shape_env.guards if _ends(guard.expr, size.node.expr, last)]
    frames = [found for guard in guards if (found := _PLACE.search(guard.sloc.maybe_user_loc or ""))]
    where = f", at {frames[0][1]}:{frames[0][2]}" if frames else ""
    refusal = CountsTokens(
        f"{type(model).__name__} {_CANNOT}: it holds for calls of {first} to {last} tokens only, and another one for the next longer "
        f"calls{where}. Python loops over blocks of tokens do that; a reshape into blocks, and arange and comparisons of tensors, do not."
    )
    refusal.frames = tuple((file, int(line), function) for file, line, function in (found.groups() for found in frames[:1]))
    return refusal


def _ends(expression: Any, tokens: Symbol, last: int) -> bool:
    """Whether a guard holds for calls of `last` tokens and not for one of the next."""
    holds = [expression.subs(tokens, count) for count in (last, last + 1)]
    return holds == [True, False]


def lacks_fake(failure: BaseException | None) -> bool:
    """Whether Dynamo met a custom op of which it does not know what shapes it gives."""
    return any(words in str(failure) for words in ("does not support running with fake tensors", "no fake impl registered"))


def fails_in(code_names: Iterable[str], failure: BaseException | None) -> bool:
    """Whether Dynamo failed in code of one of these names."""
    return not {frame.filename for frame in getattr(failure, "real_stack", None) or ()}.isdisjoint(code_names)


def with_advice(model: nn.Module, refusal: NotTraced) -> NotTraced:
    """The same refusal, with the other way where the model's attention can be reached that way."""
    if not can_be_hooked(model):
        return refusal
    return NotTraced(f"{refusal} LLM(model, compile=False), which traces nothing, may serve it.")


@contextmanager
def unwrapped_refusals() -> Iterator[None]:
    """Around a call that may compile: an UnsupportedError of ours comes out as itself, not in Dynamo's BackendCompilerFailed."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        yield
    except BackendCompilerFailed as failure:
        if isinstance(failure.inner_exception, UnsupportedError):
            raise failure.inner_exception from None
        raise
