"""The levels of `torch.vmap` that a slice of a graph runs in.

What enters and leaves a level gives no value to other nodes, so that a slice does not hold it.
"""

from __future__ import annotations

from types import TracebackType

from torch import fx
from torch._C._functorch import _vmap_decrement_nesting, _vmap_increment_nesting

from paged_attn.passes.fx.graph_tools import name_of

UNKNOWN = 1  # the size of a level's batch: operations read it from their tensors


class VmapLevels:
    """A context in which nodes run in the order of their graph; at its end all levels that were entered have been left.

    Trap: levels are numbered from the outermost one in the process, and a trace holds those numbers: inside another vmap they are wrong.
    """

    def __init__(self) -> None:
        self._entered = 0

    def before(self, node: fx.Node) -> None:
        """Enter the level whose batch dim the node gives to a tensor, and those around it."""
        if node.op == "call_function" and name_of(node) == "_add_batch_dim":
            while self._entered < _level(node.args[2]):
                _vmap_increment_nesting(UNKNOWN, "error")
                self._entered += 1

    def after(self, node: fx.Node) -> None:
        """Leave the level whose batch dim the node has taken from a tensor."""
        if node.op == "call_function" and name_of(node) == "_remove_batch_dim":
            self._leave(_level(node.args[1]) - 1)

    def __enter__(self) -> VmapLevels:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(0)

    def _leave(self, level: int) -> None:
        while self._entered > level:
            _vmap_decrement_nesting()
            self._entered -= 1


def _level(given: fx.node.Argument) -> int:
    assert isinstance(given, int), given
    return given
