"""`torch.ops.paged_attn.module_with_output`: a captured graph calls a module of the model that torch.compile can not trace.

Such a module branches on its data (a loop over the experts that got a token). It must compute each token by itself; the engine's
self-check proves that. It mutates `output` alone and is a split point, so that it runs between compiled pieces.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from paged_attn.attn_ops.errors import ContextError
from paged_attn.attn_ops.ops.define import define_op

_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_calls: dict[int, Callable[[nn.Module, Sequence[Tensor]], Tensor]] = {}
_ids = itertools.count()


def register_module(module: nn.Module, call: Callable[[nn.Module, Sequence[Tensor]], Tensor]) -> int:
    """A number under which graphs may call `call(module, inputs)`; it lives as long as the module, which is not kept alive."""
    number = next(_ids)
    _modules[number], _calls[number] = module, call
    weakref.finalize(module, _calls.pop, number, None)
    return number


def _run(inputs: Sequence[Tensor], output: Tensor, module_id: int) -> None:
    """inputs: what the module is given; output: in the shape of what it returns."""
    module = _modules.get(module_id)
    if module is None:
        raise ContextError(f"the graph calls module {module_id}, which no longer exists; keep the model alive as long as its engine")
    output.copy_(_calls[module_id](module, inputs))


MODULE = define_op("module_with_output(Tensor[] inputs, Tensor(a!) output, int module_id) -> ()", _run)
