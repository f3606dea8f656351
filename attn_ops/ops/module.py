"""Two ops through which a captured graph calls an unmodified module of the model.

`torch.ops.paged_attn.module_with_output` is for one that branches on its data (a loop over the experts that have a token). It must compute
each token by itself; the engine's self-check proves that. It mutates only `output` and is a split point, so that it runs between compiled
pieces.

`torch.ops.paged_attn.module_on_all_tokens` is for one that mixes tokens in a way that is neither attention nor a recurrence. It is given
one sequence from its beginning on; in a paged model it is part of the program of a layer that is recomputed (`ops/recompute.py`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.ops.define import define_op

_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_calls: dict[int, Callable[[nn.Module, Sequence[Tensor]], Tensor]] = {}
_ids = itertools.count()


def register_module(module: nn.Module, call: Callable[[nn.Module, Sequence[Tensor]], Tensor]) -> int:
    """A number by which graphs may call `call(module, inputs)`; valid while the module lives, which this does not keep alive."""
    number = next(_ids)
    _modules[number], _calls[number] = module, call
    weakref.finalize(module, _calls.pop, number, None)
    return number


def _run(inputs: Sequence[Tensor], output: Tensor, module_id: int) -> None:
    """inputs: the module's arguments; output: shaped like its result."""
    output.copy_(_call(inputs, module_id))


def module_of(module_id: int) -> nn.Module:
    """The module that graphs call by this number; ContextError if it no longer exists."""
    module = _modules.get(module_id)
    if module is None:
        raise ContextError(f"the graph calls module {module_id}, which no longer exists; keep the model alive as long as its engine")
    return module


def call_of(module_id: int) -> Callable[[nn.Module, Sequence[Tensor]], Tensor]:
    """How the module with this number is called."""
    return _calls[module_id]


def _call(inputs: Sequence[Tensor], module_id: int) -> Tensor:
    module = module_of(module_id)
    return _calls[module_id](module, inputs)


MODULE = define_op("module_with_output(Tensor[] inputs, Tensor(a!) output, int module_id) -> ()", _run)


# inputs: the module's arguments, for one sequence; returns [1, 1, T, width] for inputs[like] [1, T, width].
MODULE_ON_ALL_TOKENS = define_op(
    "module_on_all_tokens(Tensor[] inputs, int like, int module_id) -> Tensor",
    lambda inputs, like, module_id: _call(inputs, module_id)[:, None],
    lambda inputs, like, module_id: torch.empty_like(inputs[like])[:, None],
)
