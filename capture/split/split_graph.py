"""Splits a rewritten graph, before AOT, into pieces with the split ops between them."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.passes.split_module import split_module

from paged_attn.attn_ops.ops.define import overloads_of
from paged_attn.capture.split.split_ops import is_split_op

_NAME = "name_before_split"


@dataclass(frozen=True)
class SplitGraph:
    """`gm` calls its submodules in order; `pieces` names those to compile, `breaks` those that hold one split op each.

    Attributes:
        ops: qualified names of the breaks' ops, in order: `paged_attn::unified_attention_with_output`.
        results: for every submodule, the names of its results in the original graph.
        op_names: names of the breaks' op nodes in the original graph, in order.
    """

    gm: fx.GraphModule
    pieces: tuple[str, ...]
    breaks: tuple[str, ...]
    ops: tuple[str, ...] = ()
    results: dict[str, tuple[str, ...]] = field(default_factory=dict)
    op_names: tuple[str, ...] = ()


def split_graph(gm: fx.GraphModule, ops: frozenset[OpOverload]) -> SplitGraph:
    """Pieces and split ops alternate; a node that only makes views for an op stays in the piece before it.

    A split op is one of `ops`, or tagged `cudagraph_unsafe` (`is_split_op`). If it returns several tensors, they are unpacked in its
    submodule, so that pieces only take tensors and numbers.
    The placeholders of `gm` come first. The split module takes the same arguments and returns the same output.
    """
    piece_of: dict[fx.Node, int] = {}
    breaks: dict[int, str] = {}
    op_names: list[str] = []
    current = 0
    for node in gm.graph.nodes:
        node.meta[_NAME] = node.name  # splitting renames nodes, but keeps this
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "call_function" and is_split_op(node.target, ops):
            current += 1
            breaks[current] = overloads_of(node.target)[0]._schema.name
            op_names.append(node.name)
            piece_of[node] = current
            current += 1
        elif node.target is operator.getitem and _returns_several(node.args[0]) and piece_of[node.args[0]] in breaks:
            piece_of[node] = piece_of[node.args[0]]
        else:
            piece_of[node] = current
    # The original gm is not needed as a root, because all parameters are inputs of a Dynamo graph.
    split = split_module(gm, gm, lambda node: piece_of[node], keep_original_order=True)
    names = [str(node.target) for node in split.graph.nodes if node.op == "call_module"]
    is_break = {name: int(name.removeprefix("submod_")) in breaks for name in names}
    return SplitGraph(
        split,
        tuple(name for name in names if not is_break[name]),
        tuple(name for name in names if is_break[name]),
        tuple(breaks.values()),
        {name: _results(getattr(split, name)) for name in names},
        tuple(op_names),
    )


def _results(part: fx.GraphModule) -> tuple[str, ...]:
    (output,) = (node for node in part.graph.nodes if node.op == "output")
    returned = output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)
    return tuple(str(node.meta[_NAME]) if isinstance(node, fx.Node) else "" for node in returned)


def _returns_several(node: Any) -> bool:
    returns = [op._schema.returns for op in overloads_of(node.target)] if isinstance(node, fx.Node) else []
    return bool(returns) and all(len(each) > 1 or (len(each) == 1 and isinstance(each[0].type, torch.ListType)) for each in returns)
