"""A recorder for the CPU: a tape of the operations that were dispatched, played again into the very tensors that they made.

Like a CUDA graph it knows addresses and not values: it reads the inputs where they were, writes results where they were, and refuses what
waits for a value. Unlike one it keeps all its memory and does not see kernels that Inductor compiled.
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.utils import import_utils

from paged_attn.attn_ops.ops import attention, latent, positions, recurrent, scans
from paged_attn.attn_ops.ops.define import body_of

OPS = {
    attention.UNIFIED_ATTENTION, latent.LATENT_ATTENTION, positions.BATCH_POSITIONS, positions.REQUEST_LENGTHS, recurrent.RECURRENT_LAYER,
    scans.SHORT_CONV, scans.GATED_DELTA_RULE, scans.LINEAR_ATTENTION, scans.MAMBA2_SCAN, scans.MAMBA1_SCAN, scans.CHANNEL_SCAN,
}  # fmt: skip
WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.item.default}


class Tape:
    def __init__(self):
        self.operations = []
        self.freed = False

    @torch.no_grad()
    def replay(self):
        if self.freed:
            raise AssertionError("a freed graph was replayed")
        for function, args, kwargs, results in self.operations:
            new = function(*args, **kwargs)
            if function.namespace == "_c10d_functional":  # on a stream, what comes next waits by itself
                new = tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, new)
            for old, tensor in zip(results, tree_leaves(new), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(tensor)


class _Inside(TorchDispatchMode):
    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.recorder.call(func, args, kwargs or {})


class TapeRecorder:
    """`bytes_per_graph` stands for what a graph costs; `fail_on` makes a recording fail at an op, as a device error would."""

    def __init__(self, bytes_per_graph: int = 1000):
        self.tapes, self.open, self.bytes_per_graph, self.aborted = [], None, bytes_per_graph, 0

    @contextmanager
    def session(self):
        """Models that ask whether a CUDA stream is capturing are told what they would be told there."""
        with mock.patch.object(import_utils, "is_cuda_stream_capturing", lambda: self.open is not None):
            yield

    def begin(self):
        assert self.open is None
        self.open = Tape()

    def end(self):
        tape, self.open = self.open, None
        self.tapes.append(tape)
        return tape.replay if tape.operations else None

    def abort(self):
        self.aborted += self.open is not None
        self.open = None

    def call(self, function, args, kwargs):
        if function in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        if function in OPS:  # seen as what it launches
            with _Inside(self):
                return body_of(function)(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"):
            with _Inside(self):  # `to` returns its argument or a copy: seen as what it does
                return function.decompose(*args, **kwargs)
        result = function(*args, **kwargs)
        returns = function._schema.returns
        if any(r.alias_info is not None for r in returns):  # a view, or written in place: done by doing it again, or by having done it
            views = not any(a.alias_info is not None and a.alias_info.is_write for a in function._schema.arguments)
            if not views:
                self.open.operations.append((function, args, kwargs, [None] * len(tree_leaves(result))))
        else:
            self.open.operations.append((function, args, kwargs, tree_leaves(result)))
        return result

    def borrow(self, tensor):
        return tensor

    def bytes_in_use(self):
        return self.bytes_per_graph * len(self.tapes)

    def mark(self):
        return len(self.tapes)

    def rollback(self, mark):
        for tape in self.tapes[mark:]:
            tape.freed = True
        del self.tapes[mark:]
