"""Compiles the kernels of a graph's steps in other processes: runs the steps on fake tensors, which launch nothing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from paged_attn.attn_ops.batch.batch import Batch, BatchRequest
from paged_attn.attn_ops.context import ForwardContext
from paged_attn.attn_ops.errors import UnsupportedError
from paged_attn.attn_ops.kv.kv_pool import KVPool
from paged_attn.attn_ops.ops.attention import UNIFIED_ATTENTION
from paged_attn.attn_ops.ops.define import body_of
from paged_attn.attn_ops.ops.dual_chunk import DUAL_CHUNK_ATTENTION
from paged_attn.attn_ops.ops.kinds import SCANS
from paged_attn.attn_ops.ops.latent import LATENT_ATTENTION
from paged_attn.attn_ops.ops.linears.add_norm import ADD_NORM, ADD_NORM_LINEAR
from paged_attn.attn_ops.ops.linears.linear import LINEAR, LINEAR_FLOAT32, one_row
from paged_attn.attn_ops.ops.routing import ROUTE
from paged_attn.attn_ops.specs.attention import AttentionSpec
from paged_attn.attn_ops.specs.recurrent import RecurrentSpec
from paged_attn.backends.selection.requirements import Requirements
from paged_attn.backends.selection.scans import scans_backend
from paged_attn.backends.selection.select import select
from paged_attn.passes.fx.graph_tools import symbol, value_of
from paged_attn.passes.fx.slicing import attribute_of
from paged_attn.recurrent.layer import RecurrentLayer
from paged_attn.recurrent.run import OnlyKernels, runner_of

# Steps of requests with so many cached and new tokens: one for each way in which a backend's launches follow lengths.
Lengths = tuple[tuple[int, int], ...]
DECODED: tuple[Lengths, ...] = (
    ((100, 1),), ((600, 1),), ((100, 1),) * 2, ((16_000, 1),) * 8, ((16_000, 1),) * 16, ((50, 1),) * 40, ((16_000, 1),) * 20,
    ((2000, 1),) * 96,
)  # fmt: skip
PROMPTS = tuple(((0, new),) for new in (600, 4096))
MIXED = tuple(decoded + prompt for decoded, prompt in itertools.product(DECODED, PROMPTS))
SHORT = (*(((0, new),) for new in (2, 4, 8, 16, 32, 64)), ((50, 9),))
STEPS = (*DECODED, *PROMPTS, *MIXED, *SHORT)
MOST = 97  # requests in any of these steps
PAGES = 2  # size of the pool, whatever page ids the requests have
SOME = 7  # tokens, where the number does not matter
ATTENTION = (UNIFIED_ATTENTION, DUAL_CHUNK_ATTENTION, LATENT_ATTENTION)


@dataclass(frozen=True)
class RunsWith:
    """What steps will run with.

    Attributes:
        backend: for attention, by name, or "auto".
        recurrent: the layers with recurrent state, by layer id.
        checked: (cached, new) tokens of the requests of each step of the self-check, which comes first.
    """

    backend: str
    page_size: int
    deterministic: bool
    recurrent: tuple[RecurrentLayer, ...] = ()
    checked: tuple[Lengths, ...] = ()


def compile_steps_ahead(
    graph: fx.Graph, layers: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, runs_with: RunsWith
) -> None:
    """The kernels of steps through the graph, of products with one row, and of routing; none of attention that does not compile so.

    Args:
        layers: one spec per attention layer.
        dtype: of the model, and of its keys and values.
    """
    from paged_attn.backends.compiling.compile_ahead import compiling_ahead, on_fakes

    required = Requirements.of(layers, dtype, dtype, runs_with.page_size, device, deterministic=runs_with.deterministic)
    try:
        backend = select(runs_with.backend, required).backend
    except UnsupportedError:
        return  # reported by the code that runs a step
    ours = all(scans_backend(each.name).compiles_ahead for layer in runs_with.recurrent for each in layer.scans)
    batches = [_batch(lengths, runs_with.page_size) for lengths in (*runs_with.checked, *STEPS)]
    with compiling_ahead(device):
        for op in (LINEAR, LINEAR_FLOAT32):
            for node in _distinct(graph, op, None):
                (x, weight, *bias), _ = _operands(node, 1)
                one_row(x, weight, bias[0] if bias else None, x.dtype if op is LINEAR else torch.float32)
        for op, rows in ((ROUTE, 1), (ADD_NORM_LINEAR, 1), (ADD_NORM_LINEAR, SOME), (ADD_NORM, SOME)):
            for node in _distinct(graph, op, None):
                _run(node, rows)  # launched alike for any number of rows, or for any but one
        pool, states = KVPool(layers, PAGES, runs_with.page_size, dtype, device), runner_of(runs_with.recurrent, MOST, device, OnlyKernels)
        attentions = [node for op in ATTENTION for node in _distinct(graph, op, layers)]
        specs = [layer.spec for layer in runs_with.recurrent]
        scans = [node for op in SCANS for node in _distinct(graph, op, specs)] if ours else []
        for batch in batches:
            with ForwardContext(on_fakes(batch, device), pool, backend.while_compiling_ahead(), states):
                for node in [*attentions, *scans]:
                    _run(node, batch.num_rows)


def _run(node: fx.Node, rows: int) -> None:
    """The body of an op on the fake tensors of a call of so many tokens, all of whose logits are wanted."""
    args, kwargs = _operands(node, rows)
    assert isinstance(node.target, OpOverload)
    body_of(node.target)(*args, **kwargs)


def _operands(node: fx.Node, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def size(number: Any) -> int:
        expression = symbol(number)
        return expression if isinstance(expression, int) else int(expression.subs(dict.fromkeys(expression.free_symbols, rows)))

    @functools.cache
    def fake(node: fx.Node) -> Any:
        value = attribute_of(node) if node.op == "get_attr" else value_of(node)
        if isinstance(value, Tensor):
            return torch.empty_strided([*map(size, value.shape)], [*map(size, value.stride())], dtype=value.dtype, device=value.device)
        if value is not None:
            return size(value)
        assert callable(node.target)  # nodes that passes put around their ops have no recorded value
        return node.target(*fx.map_arg(node.args, fake), **fx.map_arg(node.kwargs, fake))

    return fx.map_arg(node.args, fake), fx.map_arg(node.kwargs, fake)


def _distinct(graph: fx.Graph, op: OpOverload, layers: Sequence[AttentionSpec | RecurrentSpec] | None) -> list[fx.Node]:
    """The first of calls that differ in the layer alone, where the layers are alike; `layers` of an op that has a layer's id."""
    found: dict[Hashable, fx.Node] = {}
    names = [argument.name for argument in op._schema.arguments]
    for node in graph.find_nodes(op="call_function", target=op):
        args, kwargs = _operands(node, SOME)
        given = dict(zip(names, args, strict=False)) | kwargs
        if layers is not None:
            layer = layers[given["layer_id"]]
            given["layer_id"] = replace(layer, module="", **({"kv_layer": 0} if isinstance(layer, AttentionSpec) else {}))
        kind = {name: (each.dtype, each.shape, each.stride()) if isinstance(each, Tensor) else each for name, each in given.items()}
        found.setdefault(tuple(kind.items()), node)
    return list(found.values())


def _batch(lengths: Sequence[tuple[int, int]], page_size: int) -> Batch:
    requests = [
        BatchRequest([0] * new, [1] * -(-(cached + new) // page_size), cached, int(new == 1), slot)
        for slot, (cached, new) in enumerate(lengths, 1)
    ]
    return Batch.build(requests, page_size)
