"""Turns weights of experts that are stacked in the graph into one tensor that the graph's caller keeps, as for merged linears.

Before: paged_attn.experts(..., torch.cat([owned, owned, ...]).view(E, rows, H), ...), or other views of it
After:  paged_attn.experts(..., merged.view(E, rows, H), ...)
Left alone: stacks of anything but the graph's own inputs, or of inputs that are used elsewhere too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from paged_attn.attn_ops.ops.experts import EXPERTS
from paged_attn.passes.fx.graph_tools import value_of
from paged_attn.passes.fx.memory import behind_views
from paged_attn.passes.optimize.linears.merge import Merge

logger = logging.getLogger("paged_attn")
WEIGHTS = slice(3, 7)  # positions of the weights in the op's arguments


def keep_stacked(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> tuple[Merge, ...]:
    """Rewrites in place; returns what the caller must concatenate before running the graph (see `Merge`). `values`: the graph's inputs."""
    index = {node: i for i, node in enumerate(node for node in graph.nodes if node.op == "placeholder")}
    merges = []
    for experts in [node for node in graph.nodes if node.target is EXPERTS]:
        for view in experts.args[WEIGHTS]:
            stack = behind_views(view)
            if not isinstance(stack, fx.Node) or stack.target is not torch.cat:
                continue
            parts: list[Any] = list(stack.args[0])  # type: ignore[arg-type]
            if not all(part in values and set(part.users) == {stack} for part in parts):
                logger.warning("weights of experts are stacked in every step: something else uses them too")
                continue
            merges.append(Merge(tuple(index[part] for part in parts), tuple(int(value_of(part).shape[0]) for part in parts)))
            parts[0].meta["example_value"] = value_of(stack)
            stack.replace_all_uses_with(parts[0])
            graph.erase_node(stack)
    if merges:
        logger.info("%d weights of experts lie in %d tensors", sum(len(merge.inputs) for merge in merges), len(merges))
    return tuple(merges)
