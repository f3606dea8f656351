"""Records a thread's launches to replay them at the same addresses: CUDA graphs, behind an interface that tests can fake on a CPU."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from paged_attn.attn_ops.errors import CaptureError

Replay = Callable[[], None]
MOST_DRIVER_BYTES = 64 * 2**20  # allowed growth outside PyTorch's allocator during one recording


class Recorder(Protocol):
    """A memory pool and the graphs recorded into it. Only one thread records; any may replay."""

    def session(self) -> Any:
        """A context for one recording; recorded work and work that runs in between happen in order inside it."""

    def begin(self) -> None:
        """From here on, record this thread's launches instead of running them."""

    def end(self) -> Replay | None:
        """What was recorded since `begin`, or None if nothing was."""

    def abort(self) -> None:
        """After an exception between `begin` and `end`: discard what was recorded, and leave the device usable."""

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation that the recorded code dispatches."""

    def borrow(self, tensor: Tensor) -> Tensor:
        """The tensor's memory without owning it: the pool may reuse it for later recordings."""

    def bytes_in_use(self) -> int:
        """Device memory in use, to be compared before and after a recording."""

    def mark(self) -> int:
        """A point to which `rollback` can return."""

    def rollback(self, mark: int) -> None:
        """Free what was recorded since (0: everything); its replays stop working."""


class CudaRecorder:
    """CUDA graphs in one private memory pool.

    Allocation errors of other threads do not end a recording (capture mode "thread_local"), and other threads may replay during it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._open: torch.cuda.CUDAGraph | None = None
        self._outside, self._driver = 0, 0  # bytes outside PyTorch's allocator: in total, and those attributed to the graphs

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
        self._graphs.append(graph)  # even an empty one: what was allocated in it lives as long as the pool
        return None if any("empty" in str(warning.message) for warning in said) else graph.replay

    def abort(self) -> None:
        graph, self._open = self._open, None
        if graph is None:
            return
        try:
            graph.capture_end()
        except RuntimeError:
            # CUDA has ended the invalid capture, but torch stopped there: its two allocators and random generators are still in it. They
            # leave it only when a capture ends successfully, so have the driver begin an empty one.
            _begin_empty_capture(torch.cuda.current_stream(self.device))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that the graph is empty
                graph.capture_end()
        graph.reset()
        self._renew_pool()

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return function(*args, **kwargs)

    def borrow(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def bytes_in_use(self) -> int:
        """Bytes of PyTorch's allocator plus other growth, which is the driver's for graphs unless it is too large to be."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        outside = total - free - reserved
        if (grown := outside - self._outside) <= MOST_DRIVER_BYTES:
            self._driver = max(self._driver + grown, 0)
        self._outside = outside
        return reserved + self._driver

    def mark(self) -> int:
        return len(self._graphs)

    def rollback(self, mark: int) -> None:
        torch.cuda.synchronize(self.device)
        for graph in self._graphs[mark:]:
            graph.reset()
        del self._graphs[mark:]
        self._renew_pool()

    def _renew_pool(self) -> None:
        """A pool dies with the last graph in it."""
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()


def _begin_empty_capture(stream: torch.cuda.Stream) -> None:
    thread_local = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    result = ctypes.CDLL("libcuda.so.1").cuStreamBeginCapture_v2(ctypes.c_void_p(stream.cuda_stream), thread_local)
    if result:
        raise CaptureError(f"the capture failed, and the stream cannot be used again: CUDA error {result}; restart the process")
