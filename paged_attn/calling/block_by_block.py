"""Two calls of a model compared block by block, each block going on from the same values, so that rounding in one does not grow in the next
ones. In a deep model with random weights it may grow until whole calls say nothing of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paged_attn.tolerances import row_errors

Takes = Callable[[Tensor], Tensor]


def apart_by_block(model: nn.Module, logits_of: Callable[[Tensor], Tensor | None], few: Tensor, many: Tensor) -> list[Tensor] | None:
    """How far the rows of `few` tokens are off in a call of these and more, at the input of each block, and last in the logits.

    Args:
        logits_of: calls the model on ids [T]: logits [T, V], or None if it does not run.
        few, many: ids [T]; `many` begins with `few`.

    Returns:
        Errors [tokens of `few`] of each; None if the model has no blocks that are called alike, with hidden states [1, T, ...].
    """
    blocks, recorded, errors = _blocks(model), list[Tensor](), list[Tensor]()

    def record(hidden: Tensor) -> Tensor:
        recorded.append(hidden.clone())
        return hidden

    with _inputs(blocks, len(many), record):
        expected = logits_of(many)
    pending = list(reversed(recorded))

    def replace(hidden: Tensor) -> Tensor:
        if not pending:
            return hidden
        same = pending.pop()[:, : len(few)]
        if same.shape == hidden.shape:
            errors.append(row_errors(same[0], hidden[0]))
            return same.to(hidden.dtype)
        return hidden

    with _inputs(blocks, len(few), replace):
        got = logits_of(few)
    if not recorded or len(errors) != len(recorded) or expected is None or got is None:
        return None
    return [*errors, row_errors(expected[: len(few)], got)]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that lie in lists."""
    found = list[str]()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{block}.") for block in found):
            found += [f"{name}.{each}" for each, _ in module.named_children()]
    return [model.get_submodule(name) for name in found]


@contextmanager
def _inputs(blocks: Sequence[nn.Module], tokens: int, takes: Takes) -> Iterator[None]:
    """Inside, the first hidden states [1, tokens, ...] that each call of a block is given are what `takes` makes of them."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for at, value in enumerate(args):
            if _is_hidden(value, tokens):
                return (*args[:at], takes(value), *args[at + 1 :]), kwargs
        for name, value in kwargs.items():
            if _is_hidden(value, tokens):
                return args, {**kwargs, name: takes(value)}
        return args, kwargs

    with ExitStack() as undo:
        for block in blocks:
            undo.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield


def _is_hidden(value: Any, tokens: int) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2 and value.shape[:2] == (1, tokens)
