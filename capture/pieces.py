"""Compiling the pieces of a split graph; the split ops between them stay as they are."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext

from paged_attn.capture.split import SplitGraph

logger = logging.getLogger("paged_attn")


def compile_pieces(split: SplitGraph, traced: Sequence[Any]) -> None:
    """Compile every piece with Inductor, in place, with T as the symbol that Dynamo gave it.

    Args:
        traced: Dynamo's fake tensors and symbolic sizes for the graph's inputs, in order.

    Must run inside the Dynamo backend call, whose tracing context knows which sizes are symbolic.
    """
    started = time.perf_counter()
    logger.info("compiling %d pieces with Inductor; the first takes longest", len(split.pieces))
    _PieceCompiler(split).run(*_fake_inputs(traced))
    logger.info("compiled %d pieces in %.1f s", len(split.pieces), time.perf_counter() - started)


class _PieceCompiler(fx.Interpreter):
    """Walks the split graph on fake tensors; on reaching a piece it compiles it for exactly those inputs."""

    def __init__(self, split: SplitGraph) -> None:
        super().__init__(split.gm)
        self.pieces = frozenset(split.pieces)
        context = TracingContext.get()
        assert context.fake_mode is not None
        self.fake_mode = context.fake_mode

    def run(self, *args: Any, **kwargs: Any) -> Any:
        # Composite operations on symbolic sizes need the Python dispatcher (torch 2.11).
        with self.fake_mode, enable_python_dispatcher(), torch.no_grad():
            return super().run(*args, **kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().call_module(target, args, kwargs)
        piece = getattr(self.module, str(target))
        if target in self.pieces and isinstance(piece, fx.GraphModule) and _computes(piece):
            compiled = torch._inductor.standalone_compile(piece, list(args), dynamic_shapes="from_tracing_context", options={})
            setattr(self.module, str(target), _Compiled(compiled, isinstance(output, tuple)))
        return output


class _Compiled(torch.nn.Module):
    def __init__(self, compiled: Any, returns_tuple: bool) -> None:
        super().__init__()
        self.compiled, self.returns_tuple = compiled, returns_tuple

    def forward(self, *args: Any) -> Any:
        result = self.compiled(*args)
        return result if self.returns_tuple or not isinstance(result, (tuple, list)) else result[0]


def _computes(piece: fx.GraphModule) -> bool:
    return any(node.op.startswith("call_") for node in piece.graph.nodes)


def _fake_inputs(traced: Sequence[Any]) -> list[Any]:
    """What Dynamo saw, in the fake mode of the tracing context (Dynamo's own is another), with the same symbols."""
    mode = TracingContext.get().fake_mode
    assert mode is not None
    with mode:
        return [torch.empty_strided(v.size(), v.stride(), dtype=v.dtype, device=v.device) if isinstance(v, Tensor) else v for v in traced]
