"""Compiles the kernels of a graph's experts in other processes while this one continues."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.attn_ops.specs.experts import Gating
from paged_attn.backends.selection.experts import experts_backend
from paged_attn.capture.inductor.triton_cache import pin_triton_cache
from paged_attn.passes.fx.graph_tools import value_of


def compile_experts_ahead(
    backend: str, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, gating: Gating
) -> None:
    """The kernels of the op with such operands, for any number of rows; see `ExpertsBackend.compile_ahead`."""
    if w1.device.type == "cuda" and torch.version.hip is None:
        pin_triton_cache()  # otherwise the next process looks for them in another folder
    experts_backend(backend).compile_ahead(x, ids, weights, w1, w2, b1, b2, gating)


def compile_graph_ahead(graph: fx.Graph) -> None:
    """Compile the kernels of all layers of experts in a graph."""
    seen = set()
    for node in graph.find_nodes(op="call_function", target=EXPERTS):
        x, ids, weights, w1, w2, b1, b2 = (value_of(each) for each in node.args[:7])
        gating, backend = Gating(*node.args[7:-1]), str(node.args[-1])
        given = (each for each in (x, ids, weights, w1, w2, b1, b2) if each is not None)
        kind = backend, gating, *((each.dtype, *each.shape[1:], *each.stride()) for each in given)
        if kind not in seen:
            seen.add(kind)
            compile_experts_ahead(backend, x, ids, weights, w1, w2, b1, b2, gating)
