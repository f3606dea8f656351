"""Recording what a thread launches, to launch it again at the same addresses: CUDA graphs, behind an interface that tests fill on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

Replay = Callable[[], None]


class Recorder(Protocol):
    """One pool of memory and the graphs that were recorded into it. One thread records; any may replay."""

    def session(self) -> Any:
        """A context for one recording; what is recorded and what runs in between happen in order inside it."""

    def begin(self) -> None:
        """From here on this thread's launches are recorded and not run."""

    def end(self) -> Replay | None:
        """What was recorded since `begin`; None if that was nothing."""

    def abort(self) -> None:
        """After an exception between `begin` and `end`: nothing of it stays, and the device can be used."""

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation that the recorded code dispatches."""

    def borrow(self, tensor: Tensor) -> Tensor:
        """The tensor's memory without owning it: the pool may use it again for what is recorded later."""

    def bytes_in_use(self) -> int:
        """Device memory in use, to be compared before and after a recording."""

    def mark(self) -> int:
        """A point to which `rollback` can return."""

    def rollback(self, mark: int) -> None:
        """Free what was recorded since; its replays work no more. (0: all.)"""


class CudaRecorder:
    """CUDA graphs in one private memory pool.

    Allocation errors of other threads do not end a recording (capture mode "thread_local"), and other threads may replay meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._open: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = graph

    def end(self) -> Replay | None:
        graph = self._open
        assert graph is not None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            graph.capture_end()
        self._open = None
        self._graphs.append(graph)  # an empty one, too: what was allocated in it lives as long as the pool
        return None if any("empty" in str(warning.message) for warning in said) else graph.replay

    def abort(self) -> None:
        graph, self._open = self._open, None
        if graph is None:
            return
        with suppress(RuntimeError):  # that the capture is invalid is known already
            graph.capture_end()
        # A capture that ended in an error leaves the allocator in the state of a capture, and the random generators, too, which one that
        # ends well sets back.
        with suppress(RuntimeError):  # where the allocator was set back
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        again = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            again.capture_end()

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return function(*args, **kwargs)

    def borrow(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def bytes_in_use(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def mark(self) -> int:
        return len(self._graphs)

    def rollback(self, mark: int) -> None:
        torch.cuda.synchronize(self.device)
        for graph in self._graphs[mark:]:
            graph.reset()
        del self._graphs[mark:]
