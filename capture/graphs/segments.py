"""Records one run of a model in segments: graphs, and between them the ops that stay outside graphs.

Such an op is intercepted in the dispatcher, whether a compiled piece, a rewritten graph or an uncompiled model calls it (an eager break:
capture ends before the op and starts again after it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from paged_attn.capture.graphs.recorder import Recorder, Replay


@dataclass(frozen=True)
class Segments:
    """`replay()` repeats what was recorded: it reads the inputs at their addresses and writes `output` at its own.

    Attributes:
        output: what the recorded function returned; the next replay of any graph of the recorder overwrites it.
        num_graphs: the number of graphs.
        num_calls: the number of ops called between them.
    """

    steps: tuple[Replay, ...]
    output: Any
    num_graphs: int
    num_calls: int

    def replay(self) -> None:
        for step in self.steps:
            step()


class OpNotRecorded(RuntimeError):
    """An op that cannot be recorded, such as one that waits for the device."""

    def __init__(self, op: Any, reason: RuntimeError) -> None:
        super().__init__(f"{op} cannot be recorded: {reason}")
        self.op = op


def may_break(op: Any) -> bool:
    """Whether an op can stay between the graphs: it returns only tensors, whose shapes do not depend on data."""
    returns = op._schema.returns
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return bool(returns) and all(str(r.type) == "Tensor" for r in returns) and not tags & set(op.tags)


def record(run: Callable[[], Any], recorder: Recorder, breaks: Callable[[Any], bool], keep: Iterable[Tensor] = ()) -> Segments:
    """Record `run()`.

    Args:
        breaks: whether an op (an OpOverload) stays outside the graphs. Such ops also run now, between the recordings.
        keep: tensors that outlive the recording (weights, fixed inputs); the memory of others may be reused.

    Raises:
        OpNotRecorded: recording failed at an op.
        RuntimeError: recording failed elsewhere. The device stays usable.
    """
    recording = _Recording(recorder, breaks, keep)
    with recorder.session(), torch.no_grad():
        recorder.begin()
        try:
            with recording:
                output = run()
            recording.close()
        except BaseException:
            recorder.abort()
            raise
        borrowed = tree_map_only(Tensor, recording.without_owning, output)
    return Segments(tuple(recording.steps), borrowed, recording.num_graphs, recording.num_calls)


class _Recording(TorchDispatchMode):
    def __init__(self, recorder: Recorder, breaks: Callable[[Any], bool], keep: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self.breaks = recorder, breaks
        self.kept = {_memory(tensor) for tensor in keep}
        self.steps: list[Replay] = []
        self.num_graphs = self.num_calls = 0

    def close(self) -> None:
        graph = self.recorder.end()
        if graph is not None:
            self.steps.append(graph)
            self.num_graphs += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.breaks(func):
            try:
                return self.recorder.call(func, args, kwargs)
            except torch.OutOfMemoryError:
                raise  # not the op's fault
            except RuntimeError as error:
                raise OpNotRecorded(func, error) from error
        self.close()
        result = func(*args, **kwargs)
        known = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        returned = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and id(leaf) not in known]
        self.kept.update(map(_memory, returned))  # the op's own memory, which later graphs read
        args, kwargs = tree_map_only(Tensor, self.without_owning, (args, kwargs))
        self.steps.append(_call(func, args, kwargs, returned))
        self.num_calls += 1
        self.recorder.begin()
        return result

    def without_owning(self, tensor: Tensor) -> Tensor:
        return tensor if _memory(tensor) in self.kept else self.recorder.borrow(tensor)


def _call(func: Any, args: Any, kwargs: Any, returned: list[Tensor]) -> Replay:
    if not returned:
        return lambda: func(*args, **kwargs)
    known = {id(leaf) for leaf in tree_leaves((args, kwargs))}

    def call_and_copy() -> None:
        result = func(*args, **kwargs)
        new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and id(leaf) not in known]
        for fixed, tensor in zip(returned, new, strict=True):
            if fixed.shape != tensor.shape:
                raise RuntimeError(
                    f"{func} returned a tensor of shape {list(tensor.shape)}, and {list(fixed.shape)} when it was captured: the shapes of "
                    "what a split op returns may depend on the shapes of its arguments only"
                )
            fixed.copy_(tensor)

    return call_and_copy


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
